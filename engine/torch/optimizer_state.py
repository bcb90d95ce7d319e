"""State of optimizers by the names of their parameters, without conversions.

torch numbers parameters in an optimizer's own order, which may differ by rank. Its `load_state_dict` also casts state
to the dtypes of parameters. So state of another rank or an earlier step is saved and loaded by `named_state` and
`load_named_state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

UNNAMED = "param_groups["  # prefix of the substitute for the name of an unnamed parameter


def parameter_names(optimizer: torch.optim.Optimizer, modules: Iterable[Any] = ()) -> list[list[str]]:
    """Return unique names of an optimizer's parameters, by group.

    They are the names passed to `DistributedOptimizer`, those in `modules`, or those of the optimizer itself. An
    unnamed parameter is named by its position among the unnamed ones of its group.
    """
    given = getattr(getattr(optimizer, "_engine", None), "names", None)
    known: dict[int, str] = {}
    if given is not None:
        present = (each for group in optimizer.param_groups for each in group["params"])
        known = {id(each): name for each in present if (name := given.get(each)) is not None}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            known.setdefault(id(parameter), f"{number}.{name}" if number else name)
    named = []
    taken: set[str] = set()
    for g, group in enumerate(optimizer.param_groups):
        own_names = group.get("param_names") or [None] * len(group["params"])
        names: list[str] = []
        unnamed = 0
        for parameter, own in zip(group["params"], own_names, strict=True):
            name = known.get(id(parameter), own)
            if name is None or name in taken:
                name, unnamed = f"{UNNAMED}{g}].params[{unnamed}]", unnamed + 1
            taken.add(name)
            names.append(name)
        named.append(names)
    return named


def named_state(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> dict[str, Any]:
    """Return the `state_dict()` of an optimizer, with the names of parameters instead of their numbers."""
    state: dict[str, Any] = optimizer.state_dict()
    groups = state["param_groups"]
    by_number = dict(_pair_names(groups, names))
    return state | {
        "state": {by_number.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [group | {"params": list(own)} for group, own in zip(groups, names, strict=True)],
    }


def _pair_names(groups: list[dict[str, Any]], names: list[list[str]]) -> Iterator[tuple[int, str]]:
    """Yield the numbers of parameters in a `state_dict()`, each with its name."""
    for group, own in zip(groups, names, strict=True):
        yield from zip(group["params"], own, strict=True)


def load_named_state(optimizer: torch.optim.Optimizer, state: dict[str, Any], names: list[list[str]]) -> None:
    """Load the state that `named_state` has returned into an optimizer, without changing its dtypes.

    Raises ValueError if the optimizer has other parameters, or groups them differently.
    """
    groups: list[dict[str, Any]] = state["param_groups"]
    if [sorted(group["params"]) for group in groups] != [sorted(own) for own in names]:
        kept = {name: g for g, group in enumerate(groups) for name in group["params"]}
        present = {name: g for g, own in enumerate(names) for name in own}
        odd = sorted(name for name in kept.keys() | present.keys() if kept.get(name) != present.get(name))
        raise ValueError(
            "the state of an optimizer has other parameter groups, or other parameters in them, than this optimizer: "
            f"{', '.join(map(repr, odd[:5]))}{' and more' if len(odd) > 5 else ''}"
        )
    own_groups = optimizer.state_dict()["param_groups"]
    by_name = {name: number for number, name in _pair_names(own_groups, names)}
    loaded = []
    for group, own in zip(groups, own_groups, strict=True):
        ours = {key: own[key] for key in ("params", "param_names") if key in own}
        loaded.append({key: value for key, value in group.items() if key != "param_names"} | ours)
    entries = {by_name.get(key, key): value for key, value in state["state"].items()}
    _expect_same_order(optimizer, [group["params"] for group in groups], names)
    optimizer.load_state_dict(state | {"state": entries, "param_groups": loaded})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in own_groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in entries and parameter in optimizer.state:
            optimizer.state[parameter] = _restore_dtypes(optimizer.state[parameter], entries[number])


def has_order(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state of an optimizer depends on the order of its parameters, as one vector of all."""
    return isinstance(optimizer, torch.optim.LBFGS)


def _expect_same_order(optimizer: torch.optim.Optimizer, kept: list[list[str]], names: list[list[str]]) -> None:
    """Raise ValueError if the state of an optimizer depends on the order of parameters, and the order differs here."""
    if has_order(optimizer) and kept != names:
        flat = [name for group in kept for name in group], [name for group in names for name in group]
        there, here = next((old, own) for old, own in zip(*flat, strict=True) if old != own)
        raise ValueError(
            f"the state of {type(optimizer).__name__} goes by the order of its parameters, which is another one here: "
            f"{here!r} is where {there!r} was. Give it the parameters in the same order on all ranks"
        )


def _restore_dtypes(loaded: Any, given: Any) -> Any:
    """Return the given state with its own dtypes, on the devices of the loaded state.

    Loading casts tensors to other dtypes, and converts some values that are not tensors, such as strings.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(given, dict):
        for key in loaded.keys() & given.keys():
            loaded[key] = _restore_dtypes(loaded[key], given[key])
        return loaded
    if type(loaded) in (list, tuple, deque) and type(given) is type(loaded) and len(loaded) == len(given):
        return type(loaded)(_restore_dtypes(old, new) for old, new in zip(loaded, given, strict=True))
    return given
