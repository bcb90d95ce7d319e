"""Reports on a job: the first cause of a failure, and what the launcher says about it."""
