"""A job's metrics for others: an endpoint, files, and the collector that reads every rank's page."""
