"""What a run does, for whoever watches it: counter pages, Prometheus, `enginerun top`, the summary at the end."""
