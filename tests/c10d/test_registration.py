"""The backend is there after `import torch`, by entry points of the installed distribution; the package is not."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import enginerun_torch
import pytest

from .jobs import ROOT

torch = pytest.importorskip("torch")

from torch.torch_version import TorchVersion  # noqa: E402

LOADED = """
import sys, torch
print([name for name in sys.modules if name.split(".")[0] in ("engine", "engine_ext", "enginerun")])
"""


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_torch_finds_the_entry_points(group: str) -> None:
    (found,) = entry_points(group=group, name="engine")
    assert found.load().__module__ == "enginerun_torch"


def test_importing_torch_imports_nothing_of_the_package() -> None:
    told = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_registration_leaves_the_default_of_devices() -> None:
    backend = torch.distributed.Backend
    assert backend.backend_list.count("engine") == 1
    enginerun_torch.register()
    assert backend.backend_list.count("engine") == 1
    assert backend.default_device_backend_map["cpu"] == "gloo"


def test_a_backend_that_cannot_be_registered_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("another form of plugins")

    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo"])
    monkeypatch.setattr(torch.distributed.Backend, "register_backend", refuse)
    with pytest.warns(RuntimeWarning, match="no backend 'engine'.*another form of plugins"):
        enginerun_torch.register_at_import()


def test_a_torch_that_loses_works_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0+cpu"))
    with pytest.raises(RuntimeError, match=r"needs torch 2\.7 or newer, and this is 2\.6\.0\+cpu"):
        enginerun_torch.create_group(None, None)
