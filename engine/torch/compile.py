"""A backend for `torch.compile` that compiles a model in pieces, so that gradients are reduced while backward runs.

A compiled graph has one backward, which gives all its gradients when it is done: none of them can be on its way before.
torch splits the graph for DistributedDataParallel, where it knows of it; here it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..forms import whole_number

Backend = Callable[..., Any]


def compile_backend(backend: str | Backend = "inductor", bucket_bytes: int = 25 << 20) -> Backend:
    """A backend that splits what it is to compile by parameters, and compiles the pieces with another one.

    As in ``torch.compile(model, backend=compile_backend())``. The last layers' gradients are then reduced while the
    backward of the others runs.

    Parameters
    ----------
    backend : str or callable
        What compiles the pieces: a name as `torch.compile` takes it, or a function of a graph and example inputs.
    bucket_bytes : int
        A piece ends when its parameters have so many bytes. Larger pieces compile better, smaller ones overlap better;
        a model below it stays in one piece.

    Raises
    ------
    ValueError
        No bytes.
    torch._dynamo.exc.InvalidBackend
        No such backend.
    """
    bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 1)
    # The compiler is large, and imported only when there is something to compile.
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._dynamo.backends.registry import lookup_backend

    compiler = lookup_backend(backend)

    def compile_in_pieces(graph: Any, inputs: list[Any]) -> Any:
        # It chooses where to split, and knows nothing of DistributedDataParallel but its name.
        splitter = DDPOptimizer(bucket_bytes, compiler, first_bucket_cap=bucket_bytes)
        return splitter.compile_fn(graph, inputs)

    return compile_in_pieces
