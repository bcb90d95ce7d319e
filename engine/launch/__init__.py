"""`enginerun`: start, watch and end the ranks of a job. Runs without the native extension.

Pure: `hosts`, `plan`, `policy`, `verdict`. They decide and touch nothing.
At work: `machine` (facts), `spawn`, `processes`, `guardian`, `output`, `console`, `supervisor`, `report`, `cli`.
Options of their own: `horovodrun`, `check_build`. `engine.run`: `function`, `function_job`, `function_rank`.
"""

from __future__ import annotations

from .cli import main
from .errors import JobError, LaunchError

__all__ = ["JobError", "LaunchError", "main"]
