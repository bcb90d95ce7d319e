"""Export of a job's metrics: an endpoint, files, and the collector that reads every rank's page."""
