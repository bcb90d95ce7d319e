"""Types of the gradient hooks. A framework's binding wraps them."""

from typing import Any, Protocol, final, type_check_only

from engine_ext.core import Engine

@type_check_only
class Binding(Protocol):
    """What a framework does for the gradients that its hooks submit.

    A parameter keeps its gradient as `grad`; what else the hooks know of torch is in `torch_parameter.pxd`.
    """

    def memory_of(self, parameter: Any, /) -> Any:
        """The parameter as a tensor that lends its memory. Called once, when it is added."""
    def begin_pass(self) -> None:
        """The first gradient of a backward pass is about to be submitted: see to it that the pass is finished."""
    def replace(self, index: int, parameter: Any, gradient: Any, /) -> Any:
        """What to submit in place of a gradient that cannot be submitted as it is: a contiguous tensor, which the
        binding remembers; of a sparse gradient a tuple: indices (int64, a row for each value), values, shape and what
        is wrong with it."""
    def shares_memory(self, gradient: Any, /) -> bool:
        """Whether a gradient's memory is not its own. Asked in the first passes, and when hooks fire in a new order."""
    def room_for(self, index: int, /) -> Any:
        """A flat tensor for the elements of the gradient of a parameter that is on a GPU, and has none here: the other
        ranks' result is written there."""
    def rooms_for(self, index: int, /) -> Any:
        """What makes room on a GPU for the indices and values that all ranks have of a sparse gradient: as `room` of
        `Engine.allgather`."""
    def place_for(self, index: int, /) -> Any:
        """The tensor on a GPU that a parameter's gradient is from now on, with the parameter's dtype, shape and layout,
        or row-major. Called once, when the first gradient comes. Nobody else has what lies behind it, up to the next
        multiple of 16 bytes, and nothing that was enqueued before the parameter was added uses it."""
    def alias_for(self, index: int, /) -> Any:
        """A new tensor over the shared memory of a parameter's gradient, with metadata of its own: the next gradient.
        Called when the one before has been moved to other memory."""
    def separate(self, parameter: Any, gradient: Any, /) -> Any:
        """Give a parameter a gradient of its own instead of one that shares memory, in every pass from then on."""

def hold_the_same(groups: list[Any], seen: list[list[Any]]) -> bool:
    """Whether lists hold the same objects as others, in the same order. Objects are not compared by `==`."""

@final
class GradientHook:
    """Callable for `register_post_accumulate_grad_hook`: submits the gradient of one parameter, in C."""

    label: str
    index: int
    def __call__(self, parameter: Any, /) -> None: ...
    @property
    def due(self) -> bool:
        """Whether the next call submits the gradient, or waits for more passes to be added to it."""
    def found_in(self, hooks: dict[int, Any]) -> None:
        """Tell where the framework will find this hook: that is fetched into the cache ahead of the call."""

class GradientGroup:
    """The gradients that one optimizer reduces together."""

    def __init__(
        self,
        engine: Engine,
        binding: Binding,
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire: str | None = None,
        number: int = 0,
    ) -> None:
        """`wire` as for `Engine.allreduce`; sparse gradients travel as they are. `number` as for `Engine.mark_step`."""
    def add(
        self, parameter: Any, name: str, view: Any | None, deferred: bool = False, placed: bool = False
    ) -> GradientHook:
        """Register a parameter. `view`: a tensor in shared memory that its gradient is moved to. `deferred`: the hook
        counts passes, and `missing` tells whether there is a gradient, but it is not reduced here; it must be dense.
        `placed`: of a parameter on a GPU, the result goes to the tensor of `Binding.place_for`."""
    paused: bool
    watched: int
    """For how many passes gradients are still given to `Binding.shares_memory`."""
    fresh: bool
    """To be set by `Binding.begin_pass`: whether no parameter had a gradient before this pass."""
    urgent: bool
    """Bring gradients although fewer than `passes` have been accumulated."""
    passes: int
    """Backward passes that are added up on this rank before a reduction."""
    touched: bool
    """Whether there are such passes that have not been reduced."""
    def release(self) -> None:
        """Let go of all hooks and of the binding, when the framework has: nothing is reduced any more."""
    def restart(self) -> None:
        """Forget them."""
    active: bool
    """True from the first hook of a backward pass, or `announce`, to the end of `finish`."""
    def missing(self) -> list[int]:
        """Indices of the parameters whose gradient was not submitted in this pass."""
    def may_overlap(self, rest: list[int], gradients: list[Any]) -> bool:
        """Whether gradients that this pass has not submitted may share memory with those that it has, or with each
        other. `rest`: the indices of their parameters."""
    def mark_late(self, late: bool) -> None:
        """Have ranks compare whether their next pass is one of gradients that came after a backward pass was over."""
    def announce(self) -> None:
        """Submit *absent* for what got no gradient, without waiting."""
    def finish(self) -> list[tuple[int, Any]]:
        """`announce`, wait for all of it, mark the step's communication done.

        Returns (index, tensor that was given for it) or (index, (memory, dtype, number of the layout)) for parameters
        without a gradient here whose result exists because another rank had one;
        for those whose result has a place that the gradient was not in: (index, the tensor of `Binding.place_for`);
        and for sparse gradients the gathered indices and values: (index, [(memory, rows of each rank, bytes of a row),
        ...]).
        """
