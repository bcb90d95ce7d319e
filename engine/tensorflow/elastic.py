"""Elastic training with TensorFlow: states of variables, and of models of Keras."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..elastic.samplers import ElasticBatchSampler, ElasticSampler
from ..elastic.state import HostsUpdatedInterrupt, ObjectState, Parts, State
from ..elastic.worker.batches import loop
from ..elastic.worker.gate import JobOver
from ..elastic.worker.run import leave, run

__all__ = [
    "ElasticBatchSampler",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "JobOver",
    "ObjectState",
    "State",
    "TensorFlowKerasState",  # noqa: F822 (below)
    "TensorFlowState",
    "leave",
    "loop",
    "run",
]


class TensorFlowState(ObjectState):
    """Variables of TensorFlow in eager mode, and whatever else a training goes on from.

    Parameters
    ----------
    variables : iterable of tf.Variable or keras.Variable
        As many on all ranks, in one order. They stay the same objects, and are assigned to.
    session : optional
        Accepted for scripts that have it: None.
    **values
        As of `ObjectState`.

    Raises
    ------
    TypeError
        A session; an entry that is no variable; a value that cannot be pickled, by name.
    ValueError
        A name that the state has for something else.
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

    def _kept(self, value: Any) -> Any:
        return Parts([each.numpy() for each in value]) if value is self.variables else super()._kept(value)

    def _load(self, name: str, present: Any, kept: Any) -> None:
        if name != "variables":
            super()._load(name, present, kept)
            return
        if len(present) != len(kept):
            raise ValueError(
                f"there are {len(present)} variables here, and {len(kept)} were kept: all ranks have as many"
            )
        for variable, array in zip(present, kept, strict=True):
            variable.assign(array)


def __getattr__(name: str) -> Any:
    if name != "TensorFlowKerasState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .keras_state import TensorFlowKerasState  # Keras is imported for what needs it

    return TensorFlowKerasState
