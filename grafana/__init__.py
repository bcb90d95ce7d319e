"""The dashboards, as code: what they show is said here, and written to `dashboards/*.json` by `python -m grafana`."""
