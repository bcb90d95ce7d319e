"""Elastic training: jobs whose ranks come and go.

What lies here decides and computes, and needs neither processes nor a clock; `worker` has the sockets of a worker, and
`engine.launch.elastic` the driver. docs/architecture/elastic.md says what each module is for, and what is missing.
"""
