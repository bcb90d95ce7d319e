"""Hosts of a job: their list, the agents on them, and the messages and files that pass between."""
