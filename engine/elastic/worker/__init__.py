"""Worker side of an elastic job: these modules may block, and communicate with other processes."""
