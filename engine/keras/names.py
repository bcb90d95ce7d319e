"""Names by which variables of Keras are paired over ranks, and over the time of an elastic state.

They leave out what a process numbers by itself: the name of a model, and that of an optimizer. A layer without a name
of its own has a number, too; ranks that built other models before have to name their layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ..frameworks.agreement import unique_names


def names_of(variables: Sequence[Any]) -> list[str]:
    """The paths of variables without what all of them begin with; each is there once.

    A Sequential model that was loaded has the paths of a new one without the model's own name, and one rank alone may
    have loaded it.
    """
    parts = [str(getattr(each, "path", None) or each.name).split("/") for each in variables]
    levels = zip(*(each[:-1] for each in parts), strict=False)
    shared = len([*takewhile(lambda level: len({*level}) == 1, levels)])
    return unique_names("/".join(each[shared:]) for each in parts)


def optimizer_names(optimizer: Any, variables: Sequence[Any] | None = None) -> list[str]:
    """Names of an optimizer's variables.

    Keras writes the path of a trained variable, with underscores, before what the optimizer remembers of it. The name
    has that variable's name of `names_of` in its place.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Built.
    variables : sequence of keras.Variable, optional
        By default all that it has.
    """
    trained = list(getattr(optimizer, "_trainable_variables", None) or _trained_inside(optimizer))
    paths = [str(getattr(each, "path", None) or each.name).replace("/", "_").replace(":", "_") for each in trained]
    known = dict(zip(paths, names_of(trained), strict=True))
    found = optimizer.variables if variables is None else variables
    return unique_names(_slot_name(str(getattr(each, "path", None) or each.name), known) for each in found)


def named_variables(model: Any) -> dict[str, Any]:
    """The weights of a model, moving statistics among them, and its optimizer's variables, by their names.

    Not the state of random generators: what the ranks drop out is theirs.
    """
    weights = list(model.weights)
    named = dict(zip(names_of(weights), weights, strict=True))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables = list(optimizer.variables)
        found = zip(optimizer_names(optimizer, variables), variables, strict=True)
        named |= {f"optimizer: {name}": each for name, each in found}
    return named


def _trained_inside(optimizer: Any) -> Sequence[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [] if inner is None else getattr(inner, "_trainable_variables", [])


def _slot_name(path: str, known: dict[str, str]) -> str:
    """The name of what an optimizer remembers of one of the `known` variables, or of itself."""
    own = path.rpartition("/")[2]
    variable = own
    while variable:
        variable, _, _ = variable.rpartition("_")
        if variable in known:
            return f"{known[variable]}{own[len(variable) :]}"
    return own
