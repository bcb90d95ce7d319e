"""The hook that gives every rank the variables of one when a session of TensorFlow 1 begins."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..errors import EngineError
from ..process_sets import ProcessSet, global_process_set
from .variables import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives every rank all global variables of one, once they are initialised or restored. Collective.

    For `tf.compat.v1.train.MonitoredTrainingSession` and its kin. A checkpoint need only be there on the root.

    Parameters
    ----------
    root_rank : int
        Whose values.
    device : str
        Accepted for scripts that have it, and without effect.
    process_set : ProcessSet, optional
        Whose ranks take part.

    Raises
    ------
    EngineError
        When the session begins, in eager mode.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set
        self._operation: Any = None

    def begin(self) -> None:
        """Add the operation to the graph, which is about to be finished."""
        if tf.executing_eagerly():
            raise EngineError(
                "BroadcastGlobalVariablesHook goes with sessions of TensorFlow 1, not with eager mode: call "
                "broadcast_variables(model.variables, root_rank) after the first step"
            )
        if self._operation is None or self._operation.graph is not tf.compat.v1.get_default_graph():
            self._operation = broadcast_global_variables(self._root_rank, self._process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it, also in a session that was made anew after a failure."""
        session.run(self._operation)
