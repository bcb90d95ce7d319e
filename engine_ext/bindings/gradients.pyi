"""Types of the gradient hooks. A framework's binding wraps them."""

from collections.abc import Callable
from typing import Any

from engine_ext.core import Engine

class GradientHook:
    """Callable for `register_post_accumulate_grad_hook`: submits the gradient of one parameter, in C."""

    label: str
    index: int
    def __call__(self, parameter: Any, /) -> None: ...
    @property
    def due(self) -> bool:
        """Whether the next call brings the gradient, or waits for more passes to be added to it."""
    def found_in(self, hooks: dict[int, Any]) -> None:
        """Tell where the framework will find this hook: that is fetched into the cache ahead of the call."""

class GradientGroup:
    """The gradients that one optimizer reduces together."""

    def __init__(
        self,
        engine: Engine,
        op: int,
        prescale: float,
        postscale: float,
        on_first: Callable[[], None],
        on_slow: Callable[[int, Any, Any], Any],
        on_watch: Callable[[Any], bool],
        on_apart: Callable[[Any, Any], Any],
        wire: str | None = None,
        number: int = 0,
    ) -> None:
        """`on_first()` runs before the first submission of a backward pass. `on_slow(index, parameter, gradient)`
        returns the contiguous tensor to submit in place of a gradient that cannot be submitted as it is, and is
        expected to remember it; of a sparse gradient a tuple: indices (int64, a row for each value), values, shape.
        In the first passes, and when hooks fire in another order than before, `on_watch(gradient)` says whether a
        gradient's memory is not its own; then it is replaced by `on_apart(parameter, gradient)`, from then on in every
        pass. `wire` as for `Engine.allreduce`; sparse gradients travel as they are. `number` as for
        `Engine.mark_step`."""
    def add(self, parameter: Any, name: str, view: Any | None, deferred: bool = False) -> GradientHook:
        """Register a parameter. `view`: a tensor in shared memory that its gradient is moved to. `deferred`: the hook
        counts passes, and `missing` tells whether there is a gradient, but it is not reduced here; it must be dense."""
    paused: bool
    watched: int
    """For how many passes gradients are still given to `on_watch`."""
    fresh: bool
    """To be set by `on_first`: whether no parameter had a gradient before this pass."""
    urgent: bool
    """Bring gradients although fewer than `passes` have been accumulated."""
    passes: int
    """Backward passes that are added up on this rank before a reduction."""
    touched: bool
    """Whether there are such passes that have not been reduced."""
    def restart(self) -> None:
        """Forget them."""
    active: bool
    """True from the first hook of a backward pass, or `announce`, to the end of `finish`."""
    def missing(self) -> list[int]:
        """Indices of the parameters whose gradient was not brought in this pass."""
    def announce(self) -> None:
        """Submit *absent* for what got no gradient, without waiting."""
    def finish(self) -> list[tuple[int, Any]]:
        """`announce`, wait for all of it, mark the step's communication done.

        Returns (index, memory) for parameters without a gradient here whose result exists because another rank had one,
        and for sparse gradients the gathered indices and values: (index, [(memory, rows of each rank, bytes of a row),
        ...]).
        """
