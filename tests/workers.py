"""Parts of the suite that one of pytest-xdist's workers runs as a whole.

A worker runs the tests of a file, or of a directory whose files share what takes long to start: ranks, a cluster.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Directories whose tests share ranks, a fixture, or what they have parsed.
WHOLE_DIRECTORIES = frozenset(
    f"tests/{name}"
    for name in (
        "checks",
        "elastic",
        "frameworks",
        "gpu",
        "metrics",
        "mxnet",
        "packaging",
        "parallel",
        "ray",
        "spark",
        "strange",
        "unit",
    )
)


def find_part(nodeid: str) -> str:
    """Return the path of the file or directory that a worker runs as a whole, of a test's id."""
    path = PurePosixPath(nodeid.partition("::")[0])
    return next((str(parent) for parent in path.parents if str(parent) in WHOLE_DIRECTORIES), str(path))


class PartScheduling(LoadScopeScheduling):
    """Scheduler of pytest-xdist that gives each part to one worker, those with the most tests first."""

    def _split_scope(self, nodeid: str) -> str:
        return find_part(nodeid)
