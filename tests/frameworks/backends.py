"""Jobs for tests of Keras and TensorFlow's ops on a backend chosen by the environment, and imports for ranks only."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from ..left_out import EXTRAS, NAMES, leaving_out
from ..on_ranks import Ranks, on_ranks

BACKENDS = ("torch", "tensorflow", "jax")
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}

# Variables for TensorFlow's ops. One thread between ops: anything that blocks it blocks the program.
ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    **leaving_out(*NAMES),
}


def on_op_ranks(*ranks: int | Ranks) -> pytest.MarkDecorator:
    """Mark tests of TensorFlow's ops, and tests of Keras on TensorFlow with these numbers of ranks: they share jobs."""
    return on_ranks(*ranks, env=ENV, job="tensorflow-ops")


def environment(backend: str) -> dict[str, str]:
    """Return the environment variables of a job on a backend."""
    others = EXTRAS if backend == "jax" else NAMES
    return {**_QUIET, **leaving_out(*others), "KERAS_BACKEND": backend}


def on_backends(
    *sizes: int, backends: tuple[str, ...] = BACKENDS, spare: tuple[str, ...] = ("jax",)
) -> pytest.MarkDecorator:
    """Mark tests like `on_ranks`, with each number of ranks on each backend; of several, some are spare."""
    return on_ranks(
        *(
            Ranks(size, backend, tuple(environment(backend).items()), spare=backend in spare and len(backends) > 1)
            for backend in backends
            for size in sizes
        )
    )


class Lazy:
    """A module that is imported at its first use: on ranks, whose environment chooses the backend."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
