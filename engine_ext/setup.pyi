"""Types of what there is before an engine."""

from collections.abc import Sequence

def segment_info() -> dict[str, str | int]:
    """What two ranks must share to work together: `protocol`, `layout`, `sources`, `kernels`."""

def codes() -> dict[str, tuple[str, ...]]:
    """What numbers are called, in their order: all that a page of counters tells, and `dtypes` and `reductions`."""

def create_segment(size: int, generation: int) -> int:
    """Make the control segment of a world of `size` ranks; returns its memfd (close-on-exec)."""

def abort_segment(control: int, rank: int, size: int, hosts: Sequence[int], reason: str) -> None:
    """Fail a world in the name of rank `rank`, which has met the others and cannot make its engine. `hosts` has the
    number of each rank's host, and is empty with one host. The descriptor stays the caller's."""

def is_aborted(control: int, rank: int, size: int, hosts: Sequence[int]) -> bool:
    """Whether the world of a segment has failed already. Parameters as of `abort_segment`."""

def create_arena() -> int:
    """Make the empty memfd in which shared tensors are allocated."""

def kernel_levels() -> list[str]:
    """Kernel sets this processor can run, the best last: `plain`, `avx2`, `avx512`."""

def use_kernels(level: str) -> None:
    """Choose the kernel set of this process (`auto` takes the best). Only before the first engine."""
