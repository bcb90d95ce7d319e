"""Pictures of the dashboards from their JSON and a Prometheus, without Grafana."""
