"""Check for transformations of optax around `distributed` whose behaviour differs by rank.

Optax calls wrapped transformations from its own functions, which are therefore on the stack of an `update`, even while
a program is traced. A transformation before `distributed` in a chain sees the gradients of one rank alone. If a wrapped
transformation is called under a condition, ranks may decide differently, and wait for each other.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_LIBRARIES = ("optax", "jax", "engine", "enginerun", "contextlib", "functools")
_CONDITIONS = ("apply_if_finite", "conditionally_transform", "conditionally_mask", "maybe_update")
_CHAINS = ("chain", "named_chain")


def expect_outermost() -> None:
    """Raise ValueError if a transformation of optax around the caller's caller acts on one rank's gradients.

    It walks up the stack to the first frame of the program itself.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library not in _LIBRARIES:
            return
        if library == "optax":
            _check(frame)
        frame = frame.f_back


def _check(frame: FrameType) -> None:
    kind = frame.f_code.co_qualname.partition(".")[0]
    if kind in _CONDITIONS:
        raise ValueError(
            f"engine.jax.distributed is inside of optax.{kind}, which calls it where a condition holds on this "
            f"rank, and the other ranks would wait for it. Wrap from outside: distributed(optax.{kind}(...)), whose "
            "condition sees the gradients of all ranks"
        )
    if kind == "MultiSteps":
        skip = getattr(frame.f_locals.get("self"), "_should_skip_update_fn", None)
        if skip is not None and not getattr(skip, "__qualname__", "").startswith("MultiSteps."):
            raise ValueError(
                "engine.jax.distributed is inside of optax.MultiSteps with should_skip_update_fn, which decides by "
                "the gradients of one rank: other ranks would wait for it. Wrap from outside: "
                "distributed(optax.MultiSteps(...).gradient_transformation())"
            )
    if kind in _CHAINS and (before := _standing_before(frame.f_locals)):
        raise ValueError(
            f"engine.jax.distributed comes after {before} in an optax.{kind}: what comes before it, such as "
            "clipping, sees the gradients of one rank, and not their average. Wrap the whole chain, "
            f"distributed(optax.{kind}(...)), or put distributed() first. To change gradients before they are reduced, "
            "do so in the program, before update()"
        )


def _standing_before(local: dict[str, Any]) -> str:
    """Return a text with the number of transformations before the running one in a chain; empty if there are none."""
    if "update_fns" in local and "fn" in local:
        stages, current = list(local["update_fns"]), local["fn"]
    elif "transforms" in local and "tx" in local:
        stages, current = [each for _, each in local["transforms"]], local["tx"]
    else:
        return ""
    count = next((place for place, each in enumerate(stages) if each is current), 0)
    return f"{count} transformation{'s' * (count > 1)}" if count else ""
