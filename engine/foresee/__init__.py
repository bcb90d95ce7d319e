"""Prediction of a job on more hosts: a recorded step replayed over a model of the network, and `enginerun foresee`."""
