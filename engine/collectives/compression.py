"""Compression of tensors that are sent to other ranks. `docs/how-to/compression.md` explains how to write one's own.

There are four kinds. `Compression.fp16` and `Compression.bf16` only name a dtype: the engine casts while it packs and
unpacks. `Compression.fp8` names a format for sums between hosts. `Compression.tuned` and `tuned8` leave that choice to
a knob. A *compressor* changes one tensor in Python before its reduction, and changes the result back. A *scheme*
reduces one gradient by several collectives, and may keep an error feedback; it is passed to `DistributedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

from .adapters import adapter_of
from .reduce_ops import Adasum, Average, Op, Sum


class Compressor:
    """Base class of compressors, which compress a tensor before its reduction and decompress the result.

    Any class or object with these two methods is accepted. They are called with a tensor of the caller's framework. The
    base class changes nothing.

    Attributes
    ----------
    wire : str, optional
        Dtype, `"float16"` or `"bfloat16"`, to which the engine casts float32 and float64 tensors while they are sent.
        `"float8"`: floats travel between hosts in 8 bits. `"tuned"`, `"tuned8"`: what the knob `compression` names.
    """

    wire: ClassVar[str | None] = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to reduce, of equal shape and dtype on all ranks, and a context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor, decompressed."""
        return tensor


class NoneCompressor(Compressor):
    """Compressor that sends tensors unchanged."""


class CastCompressor(Compressor):
    """Compressor whose cast the engine does while it packs. Its methods do the same cast for explicit callers."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor, cast if its dtype is floating, and its former dtype for `decompress`. Needs no engine."""
        return adapter_of(tensor).cast(tensor, cls.wire)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype `ctx`, which `compress` has returned."""
        return tensor if ctx is None else adapter_of(tensor).cast(tensor, ctx)[0]


class FP16Compressor(CastCompressor):
    """Compressor that sends float32 and float64 as float16. Values beyond 65504 become infinite."""

    wire = "float16"


class BF16Compressor(CastCompressor):
    """Compressor that sends float32 and float64 as bfloat16: the range of float32, with 8 bits of precision."""

    wire = "bfloat16"


class FP8Compressor(Compressor):
    """Compressor that sends sums of floats between hosts in 8 bits: float8 e4m3, with a power of two for 64 elements.

    It takes Sum and Average of tensors in the host's memory, and keeps 4 significant bits. On one host nothing is
    compressed. Called by hand its methods change nothing.
    """

    wire = "float8"


class TunedCompressor(Compressor):
    """Compressor that sends float32 and float64 as the knob `compression` says: unchanged, or as bfloat16.

    The tuner turns this knob. A knob of `fp8` counts as `bf16` here.
    """

    wire = "tuned"


class Tuned8Compressor(Compressor):
    """Compressor that sends floats as the knob `compression` says, also in 8 bits where `FP8Compressor` can.

    Elsewhere a knob of `fp8` counts as `bf16`. The tuner turns this knob.
    """

    wire = "tuned8"


class Compression:
    """Compressors that come with the engine."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp8 = FP8Compressor
    tuned = TunedCompressor
    tuned8 = Tuned8Compressor


class Scheme:
    """Base class of schemes, which average a gradient over ranks by several collectives, for `DistributedOptimizer`.

    An instance belongs to one optimizer and may keep state by parameter. All ranks must construct it with the same
    arguments. Its decisions may depend only on values that are equal on all ranks: names, shapes, received tensors, the
    number of calls.
    """

    def accepts(self, name: str, parameter: Any) -> bool:
        """Return whether this scheme averages the gradients of a parameter; others are averaged uncompressed."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this scheme that has to be equal on all ranks; it can be pickled.

        When the ranks of an elastic job have changed, new ranks, and ranks that were in the middle of a step, load the
        state of one rank. State that belongs to one rank, such as the errors of its own gradients, is not part of it.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that `state_dict` has returned on another rank; state that belongs to this rank stays."""

    def rounds(self) -> dict[str, int]:
        """Return numbers on which the rounds of gradients depend, by name of the gradient.

        Ranks compare them in each step. Gradients whose rounds do not vary may be missing.
        """
        return {}

    def reduce(self, name: str, gradient: Any) -> Generator[Any, Any, Any]:
        """Average a gradient. A generator: `average = yield tensor` averages a tensor over ranks.

        The generators of all gradients advance in step, so that the tensors of one round are sent together.

        Parameters
        ----------
        name : str
            Name of the parameter, equal on all ranks.
        gradient : tensor
            Gradient of this rank, zeros if it has none. It must not be written to.

        Yields
        ------
        tensor
            Tensor to average, of equal shape and dtype on all ranks. The average is sent back as a new tensor with the
            same bits on all ranks.

        Returns
        -------
        tensor
            Average, or an approximation of it. It must have the same bits on all ranks.
        """
        raise NotImplementedError


MARKERS: dict[str | None, type[Compressor]] = {
    kind.wire: kind
    for kind in (NoneCompressor, FP16Compressor, BF16Compressor, FP8Compressor, TunedCompressor, Tuned8Compressor)
}
"""Compressors that need no work in Python since the engine casts, by the name of the wire dtype."""


def _does_nothing(method: Any, inherited: Any) -> bool:
    """Return whether a compressor's method needs no call from Python: it does nothing, or the engine casts."""
    of_casts = getattr(CastCompressor, inherited.__name__).__func__
    return method is inherited or getattr(method, "__func__", None) is of_casts


def resolve(compression: Any, op: int | None = None) -> tuple[str | None, Any]:
    """Divide a compressor's work between the engine and Python, for the operation with which tensors are reduced.

    Returns the dtype in which tensors are sent, or `"tuned"` or `"tuned8"`, and the compressor whose methods have to be
    called; either may be None. Raises TypeError if `compression` is neither a compressor nor None. Raises ValueError if
    `op` is Adasum, which cannot be combined with compression, or one that `Compression.fp8` does not take.
    """
    if compression is None:
        return None, None
    if isinstance(compression, Scheme):
        raise TypeError(
            f"{type(compression).__name__} is a scheme for gradients: give it to DistributedOptimizer(compression=...)"
        )
    compress, decompress = (getattr(compression, name, None) for name in ("compress", "decompress"))
    if not callable(compress) or not callable(decompress):
        raise TypeError(
            "compression is Compression.none, .fp16, .bf16, .fp8, .tuned or .tuned8, or something with the methods "
            f"compress(tensor) and decompress(tensor, ctx), not {compression!r}"
        )
    idle = _does_nothing(compress, Compressor.compress) and _does_nothing(decompress, Compressor.decompress)
    wire = getattr(compression, "wire", None)
    if op == Adasum and (wire is not None or not idle):
        raise ValueError(
            "op=Adasum does not compress: it measures tensors before it combines them. Leave out compression, or use "
            "op=Average"
        )
    if wire == FP8Compressor.wire and op not in (None, Sum, Average):
        raise ValueError(
            f"Compression.fp8 takes Sum and Average, which it adds up in float32, not {Op(op).name.title()}: use "
            "Compression.bf16, or leave out compression"
        )
    return wire, None if idle else compression
