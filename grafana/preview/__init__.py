"""Images of the dashboards, rendered from their JSON and a Prometheus, without Grafana."""
