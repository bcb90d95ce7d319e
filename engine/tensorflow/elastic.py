"""Elastic training with TensorFlow: states of variables, and of Keras models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from .. import elastic
from ..elastic import *  # noqa: F403
from ..elastic.state import ObjectState, Parts, expect_alike, expect_names
from ..frameworks.agreement import unique_names
from .names import name_of

__all__ = ["TensorFlowKerasState", "TensorFlowState"]  # noqa: F405 (the first is below)
__all__ += elastic.__all__


class TensorFlowState(ObjectState):
    """State of a training job: variables of TensorFlow in eager mode, and further values.

    Parameters
    ----------
    variables : iterable of tf.Variable or keras.Variable
        Variables with equal names on all ranks, in any order; those of the same name are matched by their order. They
        stay the same objects, and are assigned to.
    session : optional
        Accepted for existing scripts, and must be None.
    **values
        Values of `ObjectState`.

    Raises
    ------
    TypeError
        A session is given, an entry is not a variable, or a value cannot be pickled; the error names it.
    ValueError
        A name is reserved by the state.
    """

    variables: list[Any]

    def __init__(self, variables: Iterable[Any], session: Any = None, **values: Any) -> None:
        if session is not None:
            raise TypeError("TensorFlowState is for eager mode, and takes no session")
        known = list(variables)
        for each in known:
            if not callable(getattr(each, "assign", None)):
                raise TypeError(f"a {type(each).__qualname__} is no variable: give it by a name, as of ObjectState")
        super().__init__(variables=known, **values)

    def _extract_state(self, value: Any) -> Any:
        if value is not self.variables:
            return super()._extract_state(value)
        return Parts({name: each.numpy() for name, each in _name_variables(value).items()})

    def _load(self, name: str, present: Any, kept: Any) -> None:
        if name != "variables":
            super()._load(name, present, kept)
            return
        named = _name_variables(present)
        expect_names(name, named, kept)
        for each, variable in named.items():
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            expect_alike(each, (np.dtype(dtype).name, variable.shape), (kept[each].dtype.name, kept[each].shape))
        for each, variable in named.items():
            variable.assign(kept[each])


def _name_variables(variables: Iterable[Any]) -> dict[str, Any]:
    known = list(variables)
    return dict(zip(unique_names(map(name_of, known)), known, strict=True))


def __getattr__(name: str) -> Any:
    if name != "TensorFlowKerasState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .keras_state import TensorFlowKerasState  # Keras is imported only if it is needed.

    return TensorFlowKerasState
