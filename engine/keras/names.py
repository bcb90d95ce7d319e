"""Names by which variables of Keras are paired over ranks, and over the time of an elastic state.

They leave out what a process numbers by itself: the name of a model, and that of an optimizer. A layer without a name
of its own has a number, too; ranks that built other models before have to name their layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..frameworks.agreement import unique_names


def names_of(variables: Sequence[Any]) -> list[str]:
    """The paths of variables without the first part, if all have it in common; each is there once.

    A Sequential model that was loaded has the paths of a new one without the model's own name, and one rank alone may
    have loaded it. The name of a layer is never left out, so that another layer is no partner.
    """
    parts = [_path(each).split("/") for each in variables]
    shared = len({each[0] for each in parts}) == 1 and min(map(len, parts)) > 2
    return unique_names("/".join(each[shared:]) for each in parts)


def weight_names(model: Any) -> list[str]:
    """The paths of a model's weights without the model's own name; each is there once."""
    paths, own = [_path(each) for each in model.weights], f"{model.name}/"
    whole = all(path.startswith(own) and path.count("/") > 1 for path in paths)
    return unique_names(path.removeprefix(own) if whole else path for path in paths)


def optimizer_names(optimizer: Any, variables: Sequence[Any] | None = None) -> list[str]:
    """Names of an optimizer's variables.

    Keras writes the path of a trained variable, with underscores, before what the optimizer remembers of it. The name
    has that variable's name of `names_of` in its place. Of variables that are alike with underscores, such as
    `a/b_c/kernel` and `a_b/c/kernel`, an optimizer has its own in the order of these.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Built.
    variables : sequence of keras.Variable, optional
        By default all that it has.
    """
    trained = list(getattr(optimizer, "_trainable_variables", None) or _trained_inside(optimizer))
    known: dict[str, list[str]] = {}
    for each, name in zip(trained, names_of(trained), strict=True):
        known.setdefault(_path(each).replace("/", "_").replace(":", "_"), []).append(name)
    seen: Counter[str] = Counter()
    found = optimizer.variables if variables is None else variables
    return unique_names(_slot_name(_path(each), known, seen) for each in found)


def named_variables(model: Any) -> dict[str, Any]:
    """The weights of a model, moving statistics among them, and its optimizer's variables, by their names.

    Not the state of random generators: what the ranks drop out is theirs.
    """
    named = dict(zip(weight_names(model), model.weights, strict=True))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables = list(optimizer.variables)
        found = zip(optimizer_names(optimizer, variables), variables, strict=True)
        named |= {f"optimizer: {name}": each for name, each in found}
    return named


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _trained_inside(optimizer: Any) -> Sequence[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [] if inner is None else getattr(inner, "_trainable_variables", [])


def _slot_name(path: str, known: dict[str, list[str]], seen: Counter[str]) -> str:
    """The name of what an optimizer remembers of one of the `known` variables, or of itself.

    `seen` counts paths, and is counted up.
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
