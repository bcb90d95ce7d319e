"""Protection from torch.compile, which traces every Python frame on its thread: also those of a process group."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any


@functools.cache
def hide_from_dynamo() -> None:
    """Mark the functions of this package, and all that they call, as not to be traced."""
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:  # a build of torch without it
        return
    for code in _find_codes():
        if hasattr(eval_frame, "set_code_exec_strategy"):
            skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
            eval_frame.set_code_exec_strategy(code, skip)
        elif hasattr(eval_frame, "skip_code"):
            eval_frame.skip_code(code)


def _find_codes() -> Iterator[types.CodeType]:
    package = __name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for value in vars(module).values():
                if getattr(value, "__module__", None) == name:
                    yield from _codes_of(value)


def _codes_of(value: Any) -> Iterator[types.CodeType]:
    if isinstance(value, types.FunctionType):
        yield value.__code__
    elif isinstance(value, type):
        for each in vars(value).values():
            function = each.fget if isinstance(each, property) else each
            if isinstance(function, types.FunctionType):
                yield function.__code__
