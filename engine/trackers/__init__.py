"""Progress of a training job for experiment trackers: throughput and exposed communication.

A tracker's `step` is called after each optimizer step, on every rank. Rank 0 logs what `ProgressMeter` measures, once
in an interval; other ranks do nothing.
"""

from .meter import ProgressMeter
from .trackers import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker

__all__ = ["MLflowTracker", "ProgressMeter", "TensorBoardTracker", "Tracker", "WandbTracker"]
