"""`enginerun`: start, watch and end the ranks of a job. Runs without the native extension.

Pure: `hosts`, `plan`, `cpu_binding`, `verdict`. They decide and touch nothing.
At work: `spawn`, `guardian`, `output`, `console`, `supervisor`, `report`, `cli`.
Options of their own: `horovod_options`, `check_build`.
"""

from __future__ import annotations

from .cli import main
from .errors import JobError, LaunchError

__all__ = ["JobError", "LaunchError", "main"]
