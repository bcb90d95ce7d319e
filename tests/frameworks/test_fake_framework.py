"""A made-up framework plugs into `engine.frameworks`, without any installed framework."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from engine.frameworks import surface

from . import fake_framework


def test_functions_are_made_with_signatures_and_documentation() -> None:
    assert surface.ORDERS.keys() == surface.DOCUMENTATION.keys()
    for name, order in surface.ORDERS.items():
        function = getattr(fake_framework, name)
        assert list(inspect.signature(function).parameters) == re.sub("=\\w+", "", order).split()
        assert (function.__name__, function.__module__) == (name, fake_framework.__name__)
        assert function.__doc__.strip() and "{" not in function.__doc__
        assert inspect.getsource(function).startswith(f"def {name}(")


def test_another_framework_may_have_another_order() -> None:
    tensors = surface.Tensors(fake_framework.np.ndarray, "numpy.ndarray")
    made = surface.make_functions("elsewhere", tensors, {"allreduce": "tensor op name"})
    assert str(inspect.signature(made["allreduce"])) == (
        "(tensor: 'Tensor', op: 'int | None' = None, name: 'str | None' = None) -> 'Tensor'"
    )


def test_the_fake_framework_is_small() -> None:
    """CONTRIBUTING.md refers to the fake framework as an example."""
    assert len(Path(fake_framework.__file__).read_text().splitlines()) < 150
