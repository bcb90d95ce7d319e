"""Place in the user's program from which a call came."""

from __future__ import annotations

import sys

# Packages whose frames stand between the user's program and the native engine.
_BETWEEN = frozenset(
    "contextlib engine engine_ext enginerun functools jax jaxlib keras mxnet optax tensorflow torch".split()
)


def place() -> str:
    """`path/train.py:33`: the innermost line of Python that belongs neither to the engine nor to what calls it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame.f_globals) in _BETWEEN:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package_of(module: dict[str, object]) -> str:
    return str(module.get("__name__")).partition(".")[0]
