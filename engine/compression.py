"""Compression of tensors on their way to the other ranks. `docs/compression.md` tells how to write one's own.

There are three kinds. `Compression.fp16` and `Compression.bf16` only name a dtype: the engine casts while it packs and
unpacks; `Compression.tuned` leaves that choice to a knob. A *compressor* changes one tensor in Python before it is
reduced, and back. A *scheme* reduces one gradient by several collectives, and may remember what it lost; it goes with
`DistributedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

from .adapters import adapter_of
from .types import Adasum


class Compressor:
    """Something done to a tensor before it is reduced, and undone to the result. A base class that does nothing.

    Any class or object with these two methods will do; they are called on a tensor of the caller's framework.

    Attributes
    ----------
    wire : str, optional
        `"float16"` or `"bfloat16"`: float32 and float64 tensors travel so, cast by the engine. `"tuned"`: as the knob
        `compression` says.
    """

    wire: ClassVar[str | None] = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to reduce, and whatever `decompress` needs to know. Equal shape and dtype on all ranks."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor, decompressed."""
        return tensor


class NoneCompressor(Compressor):
    """Tensors travel as they are."""


class CastCompressor(Compressor):
    """A compressor whose cast the engine does while it packs. Its methods do the same for who calls them by hand."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor, cast if it is of a floating dtype, and its dtype for `decompress`. Needs no engine."""
        return adapter_of(tensor).cast(tensor, cls.wire)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The tensor in the dtype `ctx`, which `compress` has told."""
        return tensor if ctx is None else adapter_of(tensor).cast(tensor, ctx)[0]


class FP16Compressor(CastCompressor):
    """float32 and float64 travel as float16. What is beyond 65504 becomes an infinity."""

    wire = "float16"


class BF16Compressor(CastCompressor):
    """float32 and float64 travel as bfloat16: the range of float32, with 8 bits of precision."""

    wire = "bfloat16"


class TunedCompressor(Compressor):
    """float32 and float64 travel as the knob `compression` says, which the tuner turns: as they are, or as bfloat16."""

    wire = "tuned"


class Compression:
    """The compressors that come with the engine."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    tuned = TunedCompressor


class Scheme:
    """A way to average a gradient over ranks, by as many collectives as it takes. For `DistributedOptimizer`.

    An instance belongs to one optimizer and may keep state by parameter. All ranks must construct it alike. A scheme
    decides by what all ranks know alike: names, shapes, what it has received, the number of calls.
    """

    def accepts(self, name: str, parameter: Any) -> bool:
        """Whether the gradients of a parameter are given to this scheme; others are averaged as they are."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """What this scheme remembers and all ranks have to know alike; it can be pickled.

        When the ranks of an elastic job have changed, those that are new, and those that were in the middle of a step,
        are given that of one rank. What a rank remembers for itself, such as the errors of its own gradients, is no
        part of it.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` has given on another rank; what this rank remembers for itself stays."""

    def rounds(self) -> dict[str, int]:
        """By name of a gradient a number on which its rounds depend, if any; ranks compare them in each step."""
        return {}

    def reduce(self, name: str, gradient: Any) -> Generator[Any, Any, Any]:
        """Average a gradient. A generator: `average = yield tensor` averages a tensor over ranks.

        The generators of all gradients go in step, so that what they yield in a round travels together.

        Parameters
        ----------
        name : str
            Of the parameter, equal on all ranks.
        gradient : tensor
            This rank's, zeros if it has none. Not to be written to.

        Yields
        ------
        tensor
            Equal shape and dtype on all ranks. What comes back is its average, a new tensor with the same bits on all
            ranks.

        Returns
        -------
        tensor
            The average, or what stands for it. It must have the same bits on all ranks.
        """
        raise NotImplementedError


MARKERS: dict[str | None, type[Compressor]] = {
    kind.wire: kind for kind in (NoneCompressor, FP16Compressor, BF16Compressor, TunedCompressor)
}
"""Compressors whose cast the engine does, by its name; Python does nothing for them."""


def _does_nothing(method: Any, inherited: Any) -> bool:
    """Whether a compressor's method leaves Python nothing to do: it does nothing, or the engine does it."""
    of_casts = getattr(CastCompressor, inherited.__name__).__func__
    return method is inherited or getattr(method, "__func__", None) is of_casts


def resolve(compression: Any, op: int | None = None) -> tuple[str | None, Any]:
    """Divide a compressor's work between the engine and Python.

    Parameters
    ----------
    compression : optional
        A compressor, or None.
    op : Op, optional
        The operation that tensors are reduced with.

    Returns
    -------
    wire : str, optional
        The dtype in which tensors travel; `"tuned"`.
    own : optional
        The compressor whose methods are to be called, if they do anything.

    Raises
    ------
    TypeError
        Not a compressor.
    ValueError
        Adasum, which does not compress.
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
            "compression is Compression.none, .fp16, .bf16 or .tuned, or something with the methods compress(tensor) "
            f"and decompress(tensor, ctx), not {compression!r}"
        )
    idle = _does_nothing(compress, Compressor.compress) and _does_nothing(decompress, Compressor.decompress)
    wire = getattr(compression, "wire", None)
    if op == Adasum and (wire is not None or not idle):
        raise ValueError(
            "op=Adasum does not compress: it measures tensors before it combines them. Leave out compression, or use "
            "op=Average"
        )
    return wire, None if idle else compression
