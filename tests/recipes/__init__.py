"""Programs of docs/libraries.md, in an environment of their own (`make recipes`)."""
