"""`enginerun`: start, watch and end the ranks of a job. Runs without the native extension.

Decisions, without side effects: `hosts`, `plan`, `cpu_binding`, `verdict`.
Actions: `spawn`, `guardian`, `output`, `console`, `supervisor`, `report`, `cli`.
Single options: `horovod_options`, `check_build`.
"""

from __future__ import annotations

from .errors import JobError, LaunchError

# Nothing else is imported here, so that agents, which need little of this package, start fast.
__all__ = ["JobError", "LaunchError"]
