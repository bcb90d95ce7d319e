"""Dashboards as code: their content is defined here, and `python -m grafana` writes it to `dashboards/*.json`."""
