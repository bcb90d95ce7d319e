"""Trainings with libraries, in an environment of their own (`make recipes`).

`libraries.py` has the programs of docs/how-to/libraries.md, and `backends.py` those over torch.distributed.
"""
