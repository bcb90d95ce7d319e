"""CPUs and threads of each rank, as a pure function of facts about the host.

The policy
----------
- *Usable* CPUs: those in the launcher's affinity set, but no more than the cgroup's CPU quota allows.
- Threads per rank: `max(1, usable // ranks)`, or the value of `--cpus-per-rank`; passed as `OMP_NUM_THREADS`, unless
  the user has set that.
- Binding: each rank to its own contiguous slice of the affinity set, in the order of cores, so that the hardware
  threads of a core stay together. Ranks are bound if there is a CPU for each rank and the quota leaves all CPUs usable.
  They are not bound with `--no-binding`, or if the user has set the placement of OpenMP threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...host.machine import Facts
from ...text import readable
from ..errors import LaunchError

SHOWN_SLICES = 8
PLACEMENT = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class Allotment:
    """CPUs and threads of each rank."""

    threads: int | None  # `OMP_NUM_THREADS` for each rank; None: the user's value is kept
    slices: tuple[tuple[int, ...], ...] | None  # CPUs of each rank; None: ranks are not bound
    summary: str  # the decision and its reason, in one line
    crowded: bool = False  # whether there are more ranks than CPUs in the affinity set


def allot_cpus(
    facts: Facts,
    ranks: int,
    environment: Mapping[str, str],
    *,
    binding: bool = True,
    cpus_per_rank: int | None = None,
) -> Allotment:
    """Decide threads and CPUs of each rank; `ranks` is the number of ranks on this host.

    The user's settings for OpenMP in `environment` are kept. A `LaunchError` is raised if the affinity set is too small
    for `cpus_per_rank`.
    """
    if cpus_per_rank is not None and binding and cpus_per_rank * ranks > len(facts.cpus):
        raise LaunchError(
            f"--cpus-per-rank {cpus_per_rank} with {ranks} ranks needs {cpus_per_rank * ranks} CPUs, and "
            f"{len(facts.cpus)} are in the affinity set: ask for fewer, or add --no-binding"
        )
    threads = cpus_per_rank or max(1, facts.usable // ranks)
    why_free = _why_free(facts, ranks, environment, binding, cpus_per_rank)
    slices = None if why_free else _divide_cpus(facts.cpus, ranks, cpus_per_rank)
    own = environment.get("OMP_NUM_THREADS")
    quota = "" if facts.quota is None else f", quota {facts.quota:g}"
    having = f"OMP_NUM_THREADS={own} as set by you" if own else f"OMP_NUM_THREADS={threads}"
    place = f"not bound ({why_free})" if slices is None else "bound to CPUs " + _describe_cpus(slices)
    return Allotment(
        threads=None if own else threads,
        slices=slices,
        summary=f"{readable.format_count(ranks, 'rank')} on {readable.format_count(len(facts.cpus), 'CPU')}{quota}: "
        f"{having}, {place}",
        crowded=ranks > len(facts.cpus),
    )


def _why_free(
    facts: Facts, ranks: int, environment: Mapping[str, str], binding: bool, cpus_per_rank: int | None
) -> str:
    """Return the reason for not binding; empty if ranks are bound."""
    if not binding:
        return "--no-binding"
    placed = [name for name in PLACEMENT if environment.get(name)]
    if placed:
        return f"{placed[0]} is set"
    if ranks > len(facts.cpus):
        return "more ranks than CPUs"
    if facts.usable < len(facts.cpus) and cpus_per_rank is None:
        return "the quota is below the affinity set"
    return ""


def _divide_cpus(cpus: tuple[int, ...], ranks: int, width: int | None) -> tuple[tuple[int, ...], ...]:
    """Divide the CPUs into one slice per rank: of `width` CPUs, or all CPUs as evenly as possible."""
    if width is not None:
        return tuple(cpus[rank * width : (rank + 1) * width] for rank in range(ranks))
    return tuple(cpus[rank * len(cpus) // ranks : (rank + 1) * len(cpus) // ranks] for rank in range(ranks))


def _describe_cpus(slices: tuple[tuple[int, ...], ...]) -> str:
    """Format slices; of many only the first ones and the last."""
    shown = [readable.format_cpus(part) for part in slices]
    return " | ".join(shown if len(shown) <= SHOWN_SLICES else [*shown[: SHOWN_SLICES - 2], "...", shown[-1]])
