"""`enginerun`: start, watch and end the ranks of a job. Runs without the native extension.

Pure: `hosts`, `plan`, `cpu_binding`, `verdict`. They decide and touch nothing.
At work: `spawn`, `guardian`, `output`, `console`, `supervisor`, `report`, `cli`.
Options of their own: `horovod_options`, `check_build`.
"""

from __future__ import annotations

from .errors import JobError, LaunchError

# No more than that: an agent of a host needs little of this package, and starts the sooner.
__all__ = ["JobError", "LaunchError"]
