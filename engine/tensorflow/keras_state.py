"""`TensorFlowKerasState`, apart from the state of variables: only it needs Keras."""

from __future__ import annotations

from typing import Any

from ..keras.elastic import KerasState


class TensorFlowKerasState(KerasState):
    """`engine.keras.elastic.KerasState`, under the name and with the parameters that Horovod has here.

    Parameters
    ----------
    model, optimizer, **values
        As of `KerasState`.
    backend : optional
        Accepted for scripts that have it, and without effect.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        super().__init__(model, optimizer, **values)
