"""Carriers: what large tensors go over between hosts, by the setting `lanes`. The native contract is
engine_ext/transport/carrier.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ..config.world import World
from ..errors import ConfigError
from ..net.rendezvous import mpi_lanes
from ..text import readable


def open_provider(
    lanes: str, world: World, generation: int, seconds: float, other_failed: Callable[[], bool]
) -> object | None:
    """Return the capsule of an `engine_carrier_provider` that the setting `lanes` names; None for "tcp". Collective.

    `lanes` may also be "mpi", or "module:function", a function from outside. All ranks of `world` have come; its number
    `generation` is equal on all ranks, and 0 or more. It waits up to `seconds` for other ranks.

    A ConfigError says that the carrier cannot be used. If `other_failed`, which tells whether another rank has given up
    and takes no part in this, returns True, an OtherFailedError is raised.
    """
    if lanes == "tcp":
        return None
    if lanes == "mpi":
        from engine_ext.transport import mpi

        library = mpi_lanes.prepare_library(world, generation, seconds, other_failed)
        return mpi.make_provider(library, library["tag"], world.size)
    provider: object | None = _find_function(lanes)(
        rank=world.rank, size=world.size, generation=generation, seconds=seconds, other_failed=other_failed
    )
    if provider is None and not other_failed():
        raise ConfigError(
            f"lanes={lanes} (ENGINE_LANES): the function has returned None instead of a carrier's provider"
        )
    return provider


def compare_carriers(carriers: Sequence[tuple[int, int] | None]) -> None:
    """Raise ConfigError if only some ranks have a carrier, or one that can sum, or their numbers of channels differ."""
    ranks: dict[tuple[int, int] | None, list[int]] = {}
    for rank, each in enumerate(carriers):
        ranks.setdefault(each, []).append(rank)
    if len(ranks) > 1:
        told = "; ".join(f"{readable.format_ranks(who)}: {_describe(each)}" for each, who in ranks.items())
        raise ConfigError(f"the ranks' carriers (the setting lanes) differ. {told}. Install the same one on every host")


def _describe(carrier: tuple[int, int] | None) -> str:
    if carrier is None:
        return "none"
    channels, sums = carrier
    return f"{channels} channels, {'with' if sums else 'no'} sums"


def _find_function(name: str) -> Callable[..., Any]:
    """Import the function that `module:function` names."""
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"lanes={name} (ENGINE_LANES) names no carrier that can be imported here: {error}. Install its module on "
            "every host, or use lanes=tcp"
        ) from error
    if not callable(found):
        raise ConfigError(f"lanes={name} (ENGINE_LANES): {function} of {module} is no function, but {found!r}")
    return found  # type: ignore[no-any-return]
