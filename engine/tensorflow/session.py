"""Session hook of TensorFlow 1 that broadcasts one rank's variables when a session begins."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..collectives.process_sets import ProcessSet, global_process_set
from ..errors import EngineError
from .variables import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Hook that broadcasts all global variables of one rank, once they are initialised or restored. Collective.

    It is for `tf.compat.v1.train.MonitoredTrainingSession` and similar sessions. Only the root needs a checkpoint.

    Parameters
    ----------
    root_rank : int
        World rank whose values are sent.
    device : str
        Accepted for existing scripts, and without effect.
    process_set : ProcessSet, optional
        Process set whose ranks take part.

    Raises
    ------
    EngineError
        A session begins in eager mode.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set
        self._operation: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph before it is finalized."""
        if tf.executing_eagerly():
            raise EngineError(
                "BroadcastGlobalVariablesHook needs sessions of TensorFlow 1, and does not work in eager mode: call "
                "broadcast_variables(model.variables, root_rank) after the first step"
            )
        if self._operation is None or self._operation.graph is not tf.compat.v1.get_default_graph():
            self._operation = broadcast_global_variables(self._root_rank, self._process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast, also in a session that was recreated after a failure."""
        session.run(self._operation)
