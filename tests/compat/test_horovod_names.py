"""Every name in Horovod's tests and examples resolves, or docs/reference/horovod-modules.md tells another."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.compat import install, modules
from engine.frameworks import basics

from ..documents import read_list, read_section

NAMES = Path(__file__).with_name("horovod_names.txt").read_text().split()
ROOT = Path(__file__).parents[2]
NEEDS = {"spark": "pyspark"} | {name: name for name in ("keras", "mxnet", "ray", "tensorflow", "torch")}


def needed(name: str) -> list[str]:
    """Return packages without which a name cannot exist."""
    return [package for part, package in NEEDS.items() if part in name.split(".")]


def documented() -> set[str]:
    """Return names that the page lists as missing."""
    items = read_list(read_section("reference/horovod-modules.md", "Names that are not there"))
    return {name for names, _ in items for name in re.findall(r"`([^`]+)`", names)} | set(modules.ABSENT)


def resolves(name: str) -> bool:
    """Return whether a script can import a name: a module, or an attribute reached from one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def lacking() -> list[str]:
    """Return names that neither resolve nor are on the page, or both; in a process with the switch on."""
    install()
    page = documented()
    usable = [name for name in NAMES if all(find_spec(package) for package in needed(name))]
    return [name for name in usable if resolves(name) == any(f"{name}.".startswith(f"{each}.") for each in page)]


@pytest.mark.slow
@pytest.mark.timeout(500)  # all frameworks are imported
def test_every_name_that_horovods_tests_and_examples_use_is_there_or_on_the_page() -> None:
    code = "from tests.compat.test_horovod_names import lacking; print('lacking', lacking())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=450, check=False
    )
    assert "lacking []" in done.stdout, done.stdout + done.stderr


def test_mxnets_binding_exports_every_name_that_horovods_tests_and_examples_use() -> None:
    """The names are read from the source: MXNet needs another Python."""
    tree = ast.parse((ROOT / "engine" / "mxnet" / "__init__.py").read_text())
    (own,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    used = {name.split(".")[2] for name in NAMES if name.startswith("horovod.mxnet.")}
    assert len(used) > 20 and not used - {*own, *basics.__all__}


def test_the_list_has_what_examples_import() -> None:
    assert {"horovod.spark.common.backend.SparkBackend", "horovod.torch.elastic.sampler.ElasticSampler"} <= set(NAMES)
    assert len(NAMES) > 300
