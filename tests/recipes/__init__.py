"""Programs of docs/how-to/libraries.md, in an environment of their own (`make recipes`)."""
