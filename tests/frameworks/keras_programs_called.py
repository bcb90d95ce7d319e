"""Names of functions of keras_programs for pytest's own process, which needs no Keras to refer to them."""

from __future__ import annotations

from typing import Any


def failures() -> Any:
    """Call `keras_programs.failures`."""
    from . import keras_programs

    return keras_programs.failures()


def interrupted_together() -> None:
    """Call `keras_programs.interrupted_together`."""
    from . import keras_programs

    keras_programs.interrupted_together()
