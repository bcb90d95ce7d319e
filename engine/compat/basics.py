"""Names of `horovod.common.basics`, and the object of that class in modules named `mpi_ops`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..collectives.process_sets import global_process_set
from ..session import runtime

__all__ = ["HorovodBasics"]

_BASICS = (
    "ccl_built cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled init is_homogeneous is_initialized "
    "local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank rocm_built shutdown size "
    "start_timeline stop_timeline"
).split()


class HorovodBasics:
    """Functions about rank, size and build as methods of an object.

    Horovod's argument, the path of a native library, is ignored.
    """

    def __init__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name not in _BASICS:
            raise AttributeError(f"HorovodBasics has no {name!r}", name=name, obj=self)
        return getattr(import_module("..", __package__), name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_BASICS]

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every process set of this world, by number; scripts use it to list the sets."""
        sets = runtime.current_session().sets
        return {each.process_set_id or 0: each.ranks for each in (global_process_set, *sets.added)}


_basics = HorovodBasics()
