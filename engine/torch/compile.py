"""Backend for `torch.compile` that compiles a model in pieces, so that gradients are reduced while backward runs.

A compiled graph has one backward pass, which returns all its gradients at the end, so none can be reduced earlier.
torch splits the graph automatically only for DistributedDataParallel; this backend does it explicitly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config.forms import whole_number

Backend = Callable[..., Any]


def compile_backend(backend: str | Backend = "inductor", bucket_bytes: int = 25 << 20) -> Backend:
    """Make a backend that splits a graph by the size of its parameters, and compiles the pieces with another backend.

    Use it as ``torch.compile(model, backend=compile_backend())``. The last layers' gradients are then reduced while the
    backward pass of the others runs.

    Parameters
    ----------
    backend : str or callable
        Backend that compiles the pieces: a name for `torch.compile`, or a function of a graph and example inputs.
    bucket_bytes : int
        Size of the parameters at which a piece ends, in bytes. Larger pieces compile better, smaller ones overlap
        better; a smaller model stays in one piece.

    Raises
    ------
    ValueError
        `bucket_bytes` is less than 1.
    torch._dynamo.exc.InvalidBackend
        There is no such backend.
    """
    bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 1)
    # The compiler is large, and imported only when there is something to compile.
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._dynamo.backends.registry import lookup_backend

    compiler = lookup_backend(backend)

    def compile_in_pieces(graph: Any, inputs: list[Any]) -> Any:
        # It chooses where to split, and does not need DistributedDataParallel itself.
        splitter = DDPOptimizer(bucket_bytes, compiler, first_bucket_cap=bucket_bytes)
        return splitter.compile_fn(graph, inputs)

    return compile_in_pieces
