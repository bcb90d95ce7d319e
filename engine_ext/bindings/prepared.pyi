"""Types of prepared calls."""

from typing import Any

from engine_ext.core import Engine

class PreparedAllreduce:
    """A blocking allreduce of one tensor in place, which `prepare_allreduce` makes.

    A call combines the tensor's present values over all ranks, and returns the tensor. It raises what `allreduce_`
    raises, and `ArgumentError` if the tensor has another shape, dtype or layout than when the call was prepared.
    """

    def __init__(
        self, engine: Engine, tensor: Any, target: Any, name: str, op: int, prescale: float, postscale: float
    ) -> None: ...
    @property
    def tensor(self) -> Any:
        """The tensor that is reduced."""
    @property
    def name(self) -> str:
        """Name of the operation on every rank."""
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Reduce the tensor's present values, and return it. There are no arguments."""
