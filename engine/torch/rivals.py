"""Detection of conflicts with other libraries, by which ranks would silently train on wrong gradients.

It finds models whose gradients torch's `DistributedDataParallel` or FSDP reduces, too: one library may then send
gradients that the other has averaged already. It finds parameters that have replaced those of the optimizer in a model,
so that nothing reduces their gradients. It finds libraries that do not know of the other ranks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import EngineError
from ..session import topology
from ..text import logs

_LOOKS = 8  # largest number of unscheduled searches, which models that alternate between layers would cause often


def expect_no_rival(named: dict[str, torch.Tensor]) -> None:
    """Raise EngineError if a parameter belongs to a live model that is wrapped for torch.distributed.

    This includes a wrapper over one rank alone: at the end of backward it would overwrite the reduced gradients by its
    own.

    Without an initialised `torch.distributed` there is none. Otherwise all objects of the process are searched, which
    takes about 10 ms, since torch keeps no list of wrapped models.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    kinds = tuple(_find_wrapper_classes())
    names = {id(parameter): name for name, parameter in named.items()}
    for each in gc.get_objects():
        if not issubclass(type(each), kinds) or getattr(each, "process_group", None) is None:
            continue
        ignored = getattr(each, "parameters_to_ignore", ())  # parameters that DDP does not reduce
        for inner, parameter in each.module.named_parameters():
            if id(parameter) in names and inner not in ignored:
                kind = type(each).__name__
                raise EngineError(
                    f"parameter {names[id(parameter)]!r} belongs to a model in {kind}, which reduces its gradient too: "
                    f"both would change it at the same time. Use one of them: leave out {kind}, or "
                    "DistributedOptimizer. A library that wraps models by itself (transformers' Trainer, Accelerate) "
                    "does so because it finds RANK and WORLD_SIZE: start the job with enginerun "
                    "--no-torchrun-variables. engine.torch.libraries has a Trainer and an Accelerator that do not "
                    "wrap the model: see docs/how-to/libraries.md"
                )


def _find_wrapper_classes() -> Iterator[type]:
    """Yield the classes that wrap models, as far as their modules are loaded."""
    yield torch.nn.parallel.DistributedDataParallel
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield fsdp.FullyShardedDataParallel


class Successors:
    """Search for parameters that have replaced those of an optimizer in modules, so that nothing reduces them.

    torch keeps no list of modules, so a search goes through all objects of the process, which takes about 30 ms. It
    runs when a hook was not called for the first time, and after 1, 2, 4, 8 .. passes with missing calls.
    """

    def __init__(self, is_hooked: Callable[[torch.Tensor], bool]) -> None:
        self._is_hooked = is_hooked  # whether a parameter belongs to any `DistributedOptimizer`
        self._known: set[int] = set()  # indices of parameters whose hook call was missing before
        self._passes = 0
        self._looks = 0  # number of unscheduled searches

    def is_due(self, silent: Sequence[int]) -> bool:
        """Count a pass in which the hooks of these parameters were not called; return whether to search."""
        self._passes += 1
        is_new = self._looks < _LOOKS and not self._known.issuperset(silent)
        self._known.update(silent)
        self._looks += is_new
        return is_new or self._passes & (self._passes - 1) == 0

    def expect_none(self, silent: dict[str, torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Raise EngineError if another parameter has replaced a silent one, which is not in any module any more.

        Silent parameters are those whose hooks were not called; `own` has all parameters of the optimizer. A
        replacement has the same shape and dtype, and a gradient. In addition it has the same attribute name, or is in
        one model with other parameters of the optimizer, or no hook of the optimizer was called at all.
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
    """Return whether a module contains, directly or in submodules, `other` and one of the parameters `own`."""
    wanted = set(map(id, own))
    parts = (set(map(id, module.parameters())) for module in modules)
    return any(id(other) in part and not wanted.isdisjoint(part) for part in parts)


def warn_of_lone_library(closure: Any) -> None:
    """Log a warning if the library that runs the training loop assumes a single process.

    `closure` is that of the optimizer's step, which Lightning binds to its module.
    """
    size, library = topology.size(), ""
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
            "process. Use engine.torch.libraries, as docs/how-to/libraries.md shows",
            library,
            size,
        )
