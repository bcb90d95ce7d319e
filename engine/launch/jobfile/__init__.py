"""`enginerun job riseml.yml`: jobs that a file describes."""
