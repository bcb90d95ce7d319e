"""The backend "engine" of torch.distributed is found by its name, and `import torch` stays as it was."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .environments import Environment

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)  # the first test builds

# Torch 2.14 and newer load the entry point when the name is used; 2.5 to 2.13 load it when they are imported.
IMPORTS = """
import sys, torch
import torch.distributed as dist
print(sorted(name for name in sys.modules if name.split(".")[0] in ("engine", "engine_ext", "enginerun")))
print(dist.Backend.default_device_backend_map["cpu"])
"""
ONE_RANK = """
import torch, torch.distributed as dist
from engine import train_one_epoch
dist.init_process_group("engine", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(train_one_epoch(), dist.get_backend(), tensor.tolist(), type(dist.group.WORLD).__module__)
dist.destroy_process_group()
"""


def test_importing_torch_imports_nothing_of_the_engine(installed: Environment) -> None:
    assert installed.python_says(IMPORTS) == "[]\ngloo"


def test_a_program_with_an_engine_of_its_own_gets_the_backend(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("def train_one_epoch(): return 'theirs'\n")
    script = tmp_path / "train.py"
    script.write_text(ONE_RANK)
    done = subprocess.run([installed.python, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "theirs engine [1.0, 1.0] enginerun.c10d.process_group\n", done.stderr
