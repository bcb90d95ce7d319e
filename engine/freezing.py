"""How ranks agree on a freeze: what they tell each other in it, and what they refuse together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import objects, readable, runtime
from .errors import EngineError
from .process_sets import global_process_set

NAME = "engine.freeze"  # of what ranks tell each other

Plan = TypeVar("Plan")


def tell(what: Any) -> list[Any]:
    """What every rank of the world tells in its freeze. Collective.

    Raises
    ------
    EngineError
        A rank has joined.
    """
    return objects.gather(what, NAME, global_process_set, "freezes nothing: call freeze() before join()")


def agree(look: Callable[[], Plan | None]) -> Plan | None:
    """Look at what this rank has to freeze, and hear whether all ranks can. Collective.

    Parameters
    ----------
    look : callable
        What this rank freezes; None: it is frozen already. Raises EngineError if that is not possible.

    Returns
    -------
    Plan or None
        What `look` has returned; None on all ranks or on none.

    Raises
    ------
    EngineError
        Of whatever kind, what `look` has raised; and on the other ranks what they are told of it. Or some ranks have
        frozen it already, and others have not.
    """
    runtime.engine()  # Without one, or in a forked child, nothing can be told.
    refusal: EngineError | None = None
    plan = None
    try:
        plan = look()
    except EngineError as error:  # The others would wait for this rank.
        refusal = error
    told: list[tuple[bool, str]] = tell((refusal is None and plan is None, str(refusal or "")))
    if refusal is not None:
        raise refusal
    if lines := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]:
        raise EngineError("\n  ".join(["freeze() is refused, since not all ranks can", *lines]))
    frozen = [rank for rank, (already, _) in enumerate(told) if already]
    if frozen and len(frozen) < len(told):
        raise EngineError(
            f"freeze(): on {readable.ranks(frozen)} it is frozen already, and not on the others: call freeze() and "
            "unfreeze() on all ranks"
        )
    return plan
