"""Pages of counters, and their consumers: exposition, `enginerun top`, summaries, dashboards, alerts."""
