"""Backends that run an estimator's ranks: `SparkBackend`, in the tasks of a Spark job, or a class of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .job import run, session_of
from .slots import default_size

__all__ = ["Backend", "SparkBackend", "default_num_proc"]


def default_num_proc() -> int:
    """Return the number of slots of the active Spark application."""
    return default_size(session_of())


class Backend:
    """Runs the training function on every rank; derive from it to train elsewhere than in Spark."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, with the variables of `env`; return the results by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of ranks."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Backend that uses `engine.spark.run`.

    `num_proc` defaults to as many ranks as Spark has slots. `env` has variables of the ranks; `options` are further
    arguments of `engine.spark.run`.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any) -> None:
        self._num_proc = num_proc
        self._env = dict(env or {})
        self._options = options

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank of a new job in Spark; return the results by rank."""
        return run(fn, args, kwargs, num_proc=self._num_proc, env={**self._env, **(env or {})}, **self._options)

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return self._num_proc or default_num_proc()
