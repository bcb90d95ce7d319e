"""Names by which variables of Keras are matched between ranks, and between commits of an elastic state.

They do not contain the names of models and optimizers, which each process numbers by itself. An unnamed layer has a
number, too, so ranks that built other models before have to name their layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..frameworks.agreement import unique_names


def names_of(variables: Sequence[Any]) -> list[str]:
    """Return unique paths of variables, without a first part that all have in common.

    A loaded Sequential model has the paths of a new one without the model's name, and maybe only one rank has loaded
    it. The name of a layer is never removed, so that different layers do not match.
    """
    parts = [_path_of(each).split("/") for each in variables]
    shared = len({each[0] for each in parts}) == 1 and min(map(len, parts)) > 2
    return unique_names("/".join(each[shared:]) for each in parts)


def weight_names(model: Any) -> list[str]:
    """Return unique paths of a model's weights, without the model's own name."""
    paths, own = [_path_of(each) for each in model.weights], f"{model.name}/"
    whole = all(path.startswith(own) and path.count("/") > 1 for path in paths)
    return unique_names(path.removeprefix(own) if whole else path for path in paths)


def optimizer_names(optimizer: Any, variables: Sequence[Any] | None = None) -> list[str]:
    """Return names of a built optimizer's variables: of those given, by default of all.

    The path of an optimizer's variable in Keras begins with that of a trained variable, with underscores. It is
    replaced by the trained variable's name from `names_of`. If several paths are equal with underscores, such as
    `a/b_c/kernel` and `a_b/c/kernel`, the optimizer's variables are in the order of these.
    """
    trained = list(getattr(optimizer, "_trainable_variables", None) or _trained_inside(optimizer))
    known: dict[str, list[str]] = {}
    for each, name in zip(trained, names_of(trained), strict=True):
        known.setdefault(_path_of(each).replace("/", "_").replace(":", "_"), []).append(name)
    seen: Counter[str] = Counter()
    found = optimizer.variables if variables is None else variables
    return unique_names(_slot_name(_path_of(each), known, seen) for each in found)


def named_variables(model: Any) -> dict[str, Any]:
    """Return the weights of a model, including moving statistics, and its optimizer's variables, by name.

    The state of random generators is not included, so that ranks have different dropout masks.
    """
    named = dict(zip(weight_names(model), model.weights, strict=True))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables = list(optimizer.variables)
        found = zip(optimizer_names(optimizer, variables), variables, strict=True)
        named |= {f"optimizer: {name}": each for name, each in found}
    return named


def _path_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _trained_inside(optimizer: Any) -> Sequence[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [] if inner is None else getattr(inner, "_trainable_variables", [])


def _slot_name(path: str, known: dict[str, list[str]], seen: Counter[str]) -> str:
    """Return the name of an optimizer's variable for one of the `known` trained variables, or for itself.

    `seen` counts paths, and is updated.
    """
    own = path.rpartition("/")[2]
    seen[own] += 1
    variable = own
    while variable:
        variable, _, _ = variable.rpartition("_")
        if variable in known:
            names = known[variable]
            return f"{names[(seen[own] - 1) % len(names)]}{own[len(variable) :]}"
    return own
