"""Reports for the user at the terminal: `enginerun top`, and the summary with advice at a job's end."""
