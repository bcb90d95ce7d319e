"""Jobs for the person at the terminal: `enginerun top`, and the summary with its advice at a job's end."""
