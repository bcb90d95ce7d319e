"""Authenticated connections between the processes of a job, and the rendezvous of ranks over them."""
