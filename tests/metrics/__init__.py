"""Pages of counters, and all that is made of them: exposition, `enginerun top`, summaries, dashboards, alerts."""
