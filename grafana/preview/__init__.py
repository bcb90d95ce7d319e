"""Recording of what a Prometheus answers to the dashboards, without Grafana."""
