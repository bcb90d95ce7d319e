"""Location in the user's program from which a call came."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine_ext.caller import place


@pytest.mark.parametrize("module", ["engine.collectives", "enginerun.collectives", "torch.nn.functional", "functools"])
def test_what_stands_between_the_program_and_the_engine_is_passed_over(module: str) -> None:
    between: dict[str, Any] = {"__name__": module}
    exec(compile("def call(function):\n    return function()\n", "/between.py", "exec"), between)
    call: Callable[[Callable[[], str]], str] = between["call"]
    assert call(place) == f"{__file__}:{sys._getframe().f_lineno}"
    assert call(lambda: call(place)).startswith(f"{__file__}:")
