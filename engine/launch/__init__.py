"""`enginerun`: start, watch and end the ranks of a job. Runs without the native extension.

Pure: `hosts`, `plan`, `policy`, `verdict`. They decide and touch nothing.
At work: `machine` (facts), `spawn`, `processes`, `guardian`, `output`, `console`, `supervisor`, `report`, `cli`.
"""

from __future__ import annotations

from engine.launch.cli import main

__all__ = ["main"]
