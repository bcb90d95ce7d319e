"""Agreement of all ranks on a freeze: they exchange their plans, and refuse it together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import EngineError
from ..text.readable import format_ranks
from . import objects
from .process_sets import global_process_set

NAME = "engine.freeze"  # name of the allgather by which ranks agree

Plan = TypeVar("Plan")


def tell(what: Any) -> list[Any]:
    """Collect one object from every rank of the world during a freeze; EngineError if a rank has joined. Collective."""
    return objects.gather_objects(what, NAME, global_process_set, "freezes nothing: call freeze() before join()")


def agree_on_freeze(look: Callable[[], Plan | None]) -> Plan | None:
    """Plan this rank's freeze, and check that all ranks can freeze. Collective.

    `look` returns the plan of this rank's freeze; None: it is frozen already. If it raises EngineError on some rank, or
    some ranks have frozen it already and others have not, all ranks raise EngineError.
    """
    refusal: EngineError | None = None
    plan = None
    try:
        plan = look()
    except EngineError as error:  # Raised after the exchange, since the other ranks wait in it.
        refusal = error
    told: list[tuple[bool, str]] = tell((refusal is None and plan is None, str(refusal or "")))
    if refusal is not None:
        raise refusal
    if lines := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]:
        raise EngineError("\n  ".join(["freeze() is refused, since not all ranks can", *lines]))
    frozen = [rank for rank, (already, _) in enumerate(told) if already]
    if frozen and len(frozen) < len(told):
        raise EngineError(
            f"freeze(): on {format_ranks(frozen)} it is frozen already, and not on the others: call freeze() and "
            "unfreeze() on all ranks"
        )
    return plan
