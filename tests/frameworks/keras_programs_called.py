"""Functions of keras_programs by name: pytest's own process, which refers to them, needs no Keras."""

from __future__ import annotations

from typing import Any


def failures() -> Any:
    """See there."""
    from . import keras_programs

    return keras_programs.failures()


def interrupted_together() -> None:
    """See there."""
    from . import keras_programs

    keras_programs.interrupted_together()
