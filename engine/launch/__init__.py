"""`enginerun`: start, watch and end the ranks of a job. Runs without the native extension.

Pure: `hosts`, `plan`, `policy`, `verdict`. They decide and touch nothing.
At work: `machine` (facts), `spawn`, `processes`, `guardian`, `output`, `console`, `supervisor`, `report`, `cli`.
Beside them: `function`, `function_job` and `function_rank` are `engine.run`; `horovod` and `check_build` are options.
"""

from __future__ import annotations

from engine.launch.cli import main
from engine.launch.errors import JobError, LaunchError

__all__ = ["JobError", "LaunchError", "main"]
