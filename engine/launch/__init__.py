"""`enginerun`: start, watch and end the ranks of a job. Runs without the native extension.

`job` runs a job from its options (`cli`) to its exit code. Ranks of one host are started and watched here
(`process.supervisor`). Otherwise each host has an `agent`, which the `driver` tells what to do. The driver's policy
decides: `fixed_policy`, or `elastic.policy` for workers that come and go.
"""

from __future__ import annotations

from .errors import JobError, LaunchError

# Nothing else is imported here, so that agents, which need little of this package, start fast.
__all__ = ["JobError", "LaunchError"]
