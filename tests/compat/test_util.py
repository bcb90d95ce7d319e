"""`horovod.common.util` asks the frameworks themselves which GPUs there are."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.compat import util


def framework(name: str, gpus: int) -> ModuleType:
    """Return a stand-in of a framework that sees so many GPUs."""
    module: Any = ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    module.cuda = SimpleNamespace(is_available=lambda: gpus > 0)
    module.config = SimpleNamespace(list_physical_devices=lambda kind: [kind] * gpus)
    module.context = SimpleNamespace(num_gpus=lambda: gpus)
    assert isinstance(module, ModuleType)
    return module


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """Forget earlier answers, and those of the stand-ins."""
    util.gpu_available.cache_clear()
    yield
    util.gpu_available.cache_clear()


@pytest.mark.parametrize("name", ["torch", "tensorflow", "mxnet"])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_gpu_available_tells_what_the_framework_sees(name: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, framework(name, gpus))
    assert util.gpu_available(name) is (gpus > 0)
    assert util.gpu_available(name, verbose=True) is (gpus > 0)


@pytest.mark.parametrize("name", ["caffe", "", "horovod.torch"])
def test_no_gpu_is_available_to_what_has_no_binding(name: str) -> None:
    assert util.gpu_available(name) is False


def test_no_gpu_is_available_to_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert util.gpu_available("torch") is False
