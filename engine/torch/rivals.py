"""Finds what a program has beside its optimizer, by which ranks would train on wrong gradients and nobody would notice.

Models whose gradients torch's `DistributedDataParallel` or FSDP reduces too: two libraries that reduce one gradient at
the same time spoil it, since one may send what the other has averaged already. Parameters that have come into a model
for those of the optimizer, so that nothing reduces their gradients. Libraries that know of no ranks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import logs, place
from ..errors import EngineError

_LOOKS = 8  # looks for other parameters out of turn: models that take turns with their layers cause many


def expect_no_rival(named: dict[str, torch.Tensor]) -> None:
    """Raise if a parameter belongs to a live model that is wrapped for torch.distributed.

    Also over one rank alone: at the end of backward it would put its own gradients back over the reduced ones.

    Without an initialised `torch.distributed` there is none. With it, all objects of the process are looked through,
    which takes some 10 ms: torch keeps no list of what it has wrapped.

    Raises
    ------
    EngineError
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    kinds = tuple(_kinds())
    names = {id(parameter): name for name, parameter in named.items()}
    for each in gc.get_objects():
        if not issubclass(type(each), kinds) or getattr(each, "process_group", None) is None:
            continue
        ignored = getattr(each, "parameters_to_ignore", ())  # those that DDP was told to leave alone
        for inner, parameter in each.module.named_parameters():
            if id(parameter) in names and inner not in ignored:
                kind = type(each).__name__
                raise EngineError(
                    f"parameter {names[id(parameter)]!r} belongs to a model in {kind}, which reduces its gradient too: "
                    f"both would change it at the same time. Use one of them: leave out {kind}, or "
                    "DistributedOptimizer. A library that wraps models by itself (transformers' Trainer, Accelerate) "
                    "does so because it finds RANK and WORLD_SIZE: start the job with enginerun "
                    "--no-torchrun-variables. engine.torch.libraries has a Trainer and an Accelerator that do not "
                    "wrap the model: see docs/libraries.md"
                )


def _kinds() -> Iterator[type]:
    """The classes that wrap models, of those modules that are loaded."""
    yield torch.nn.parallel.DistributedDataParallel
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield fsdp.FullyShardedDataParallel


class Successors:
    """Finds parameters that have come into modules for those of an optimizer, and have gradients that nobody reduces.

    It looks when hooks were not called that always were, and after 1, 2, 4, 8 .. passes of such: torch keeps no list of
    modules, so all objects of the process are looked through, which takes some 30 ms.

    Parameters
    ----------
    is_hooked : callable
        Whether a parameter belongs to any `DistributedOptimizer`.
    """

    def __init__(self, is_hooked: Callable[[torch.Tensor], bool]) -> None:
        self._is_hooked = is_hooked
        self._known: set[int] = set()  # indices of parameters that have been without a call before
        self._passes = 0
        self._looks = 0  # made out of turn

    def is_due(self, silent: Sequence[int]) -> bool:
        """Count a pass in which the hooks of these parameters were not called; whether to look for others."""
        self._passes += 1
        is_new = self._looks < _LOOKS and not self._known.issuperset(silent)
        self._known.update(silent)
        self._looks += is_new
        return is_new or self._passes & (self._passes - 1) == 0

    def expect_none(self, silent: dict[str, torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Raise if there is another parameter in the place of one of these, which no module has any more.

        Another one has its shape and dtype, a gradient, and its attribute's name; or it is in one model with others of
        the optimizer, or the hooks of all of these were not called.

        Parameters
        ----------
        silent : dict of str to torch.Tensor
            Parameters whose hooks were not called.
        own : sequence of torch.Tensor
            All parameters of the optimizer.

        Raises
        ------
        EngineError
        """
        gone = {id(parameter): name for name, parameter in silent.items()}
        modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
        others: list[tuple[str, torch.nn.Module, torch.Tensor]] = []
        for module in modules:
            for attribute, parameter in module.__dict__.get("_parameters", {}).items():
                if parameter is None or gone.pop(id(parameter), None) is not None:
                    continue
                if parameter.requires_grad and parameter.grad is not None and not self._is_hooked(parameter):
                    others.append((attribute, module, parameter))
        for name in gone.values():
            for attribute, module, other in others:
                if (other.shape, other.dtype) == (silent[name].shape, silent[name].dtype) and (
                    attribute == name.rpartition(".")[2]
                    or len(silent) == len(own)
                    or _are_in_one_model(modules, other, own)
                ):
                    raise EngineError(
                        f"parameter {name!r} is in no module any more, and {type(module).__name__}.{attribute} has a "
                        "gradient that nothing reduces: another parameter has come in its place, as by "
                        "load_state_dict(assign=True), a conversion under set_overwrite_module_params_on_conversion, "
                        "or a copy of the model. The optimizer does not train that: do it before the optimizer is "
                        "made, or make and wrap the optimizer anew"
                    )


def _are_in_one_model(modules: Sequence[torch.nn.Module], other: torch.Tensor, own: Sequence[torch.Tensor]) -> bool:
    """Whether a module has a parameter and one of others, in itself or in its parts."""
    wanted = set(map(id, own))
    parts = (set(map(id, module.parameters())) for module in modules)
    return any(id(other) in part and not wanted.isdisjoint(part) for part in parts)


def warn_of_lone_library(closure: Any) -> None:
    """Log a warning if the library that runs the training loop believes that this process is alone.

    Parameters
    ----------
    closure : optional
        Argument of the optimizer's step, which Lightning binds to its module.
    """
    size, library = place.size(), ""
    if size == 1:
        return
    accelerate = sys.modules.get("accelerate.state")
    state = getattr(getattr(accelerate, "PartialState", None), "_shared_state", {})
    if state.get("num_processes") == 1:
        library = "Accelerate, which transformers' Trainer uses, takes"
    modules = getattr(closure, "args", ())
    if any(getattr(getattr(each, "_trainer", None), "world_size", size) == 1 for each in modules):
        library = "Lightning takes"
    if library:
        logs.logger.warning(
            "%s this process for the only one, while the engine has %d ranks: each rank then divides its loss by its "
            "own number of tokens, and has metrics and checkpoints of its own, so that the result is not that of one "
            "process. Use engine.torch.libraries, as docs/libraries.md shows",
            library,
            size,
        )
