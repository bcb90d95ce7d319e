"""Options of a `DistributedOptimizer`, with their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..collectives.compression import Compression, Scheme, resolve
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Adasum, Average, Op
from ..config import forms
from ..text import logs


@dataclass(frozen=True)
class ReductionOptions:
    """Options for the reduction of one optimizer's gradients."""

    op: Op = Average
    process_set: ProcessSet = global_process_set  # ranks that reduce with each other
    compression: Any = Compression.none  # compressor or `Scheme`
    passes: int = 1  # number of backward passes that a rank accumulates before a reduction
    prescale: float = 1.0  # factor for the local gradients
    postscale: float = 1.0  # factor for the result
    # Whether to convert sparse gradients to dense ones, instead of gathering their entries
    sparse_as_dense: bool = False
    views: bool = False  # whether to keep gradients side by side, in shared memory or on a GPU
    check_parameters: bool = True  # whether to compare the ranks' parameters in the first step
    average_passes: bool = False  # whether to divide the accumulated gradients by the number of passes
    num_groups: int = 0  # number of groups in which a binding submits gradients; 0: its default
    groups: Any = field(default=None, compare=False)  # lists of parameters whose gradients a binding sends together

    @classmethod
    def from_arguments(
        cls,
        *,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        gradient_as_bucket_view: bool = False,
        check_parameters: bool = True,
        average_aggregated_gradients: bool = False,
    ) -> ReductionOptions:
        """Make options from Horovod's arguments, which `DistributedOptimizer` explains.

        Raises ValueError if an argument is invalid, or contradicts another one.
        """
        backward_passes_per_step = expect_passes(backward_passes_per_step)
        for factor, value in (("prescale_factor", prescale_factor), ("postscale_factor", postscale_factor)):
            if not math.isfinite(value):
                raise ValueError(f"{factor} is {value}; expected a finite number")
        if gradient_predivide_factor != 1.0:
            if op != Average or not 0 < gradient_predivide_factor < float("inf"):
                raise ValueError(
                    "gradient_predivide_factor needs op=Average and a positive number: give both, or leave it out"
                )
            prescale_factor /= gradient_predivide_factor
            postscale_factor *= gradient_predivide_factor
        if isinstance(compression, Scheme) and (op != Average or prescale_factor != 1.0 or postscale_factor != 1.0):
            raise ValueError(f"{type(compression).__name__} can only average gradients: use op=Average and no factors")
        num_groups = forms.whole_number("num_groups", num_groups, 0)
        if num_groups and groups is not None:
            raise ValueError("give num_groups or groups, not both")
        if gradient_as_bucket_view and process_set is not global_process_set:
            raise ValueError(
                "gradient_as_bucket_view needs the global process set: "
                "memory for gradients is shared by all ranks of the world"
            )
        if op == Adasum:
            if gradient_as_bucket_view:
                raise ValueError(
                    "op=Adasum reduces parameter changes, not gradients: leave out gradient_as_bucket_view"
                )
            compression = _drop_compression(compression, process_set)
        return cls(
            Op(op),
            process_set,
            compression,
            backward_passes_per_step,
            prescale_factor,
            postscale_factor,
            sparse_as_dense,
            gradient_as_bucket_view,
            check_parameters,
            average_aggregated_gradients,
            num_groups,
            groups,
        )

    @property
    def repeatable(self) -> bool:
        """Return whether a second reduction of a result leaves it unchanged."""
        return self.op is Average and math.isclose(self.prescale * self.postscale, 1.0)

    def __str__(self) -> str:
        """Return the options that must be equal on all ranks, as text."""
        return (
            f"op={self.op.name.title()} compression={describe_compression(self.compression)} "
            f"backward_passes_per_step={self.passes} average_aggregated_gradients={self.average_passes} "
            f"sparse_as_dense={self.sparse_as_dense} "
            f"gradient_as_bucket_view={self.views}{f' num_groups={self.num_groups}' if self.num_groups else ''}"
        )


def expect_passes(passes: int) -> int:
    """Return a checked number of backward passes per reduction; raise ValueError unless it is a positive integer."""
    return forms.whole_number("backward_passes_per_step", passes, 1)


def _drop_compression(compression: Any, process_set: ProcessSet) -> Any:
    """Return `Compression.none` for Adasum, with a warning if another compression was chosen."""
    wire, own = resolve(compression)
    if (wire is not None or own is not None) and process_set.included() and process_set.rank() == 0:
        logs.logger.warning(
            "op=Adasum does not compress: changes travel as they are, and compression=%s has no effect; leave it out",
            getattr(compression, "__qualname__", type(compression).__qualname__),
        )
    return Compression.none


def describe_compression(compression: Any) -> str:
    """Describe a compression by its class, and by its attributes that are numbers or strings."""
    if compression is None or isinstance(compression, type):
        return str(getattr(compression or Compression.none, "__qualname__", compression))
    made = getattr(compression, "__dict__", {}).items()
    plain = [f"{name.lstrip('_')}={value!r}" for name, value in made if isinstance(value, bool | int | float | str)]
    return f"{type(compression).__qualname__}({', '.join(plain)})"
