"""Contents of the archives, and libraries that the extension modules link."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # the first test builds

LIBC_FAMILY = re.compile(r"(lib(c|m|pthread|rt|dl)|ld-linux-[\w-]+|ld64)\.so\.\d+")


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_holds_every_module_and_stub_of_the_tree(wheel_names: list[str], tree: Path) -> None:
    paths = [path for top in ("autotune", "engine", "engine_ext") for path in (tree / top).rglob("*.py*")]
    sources = {str(path.relative_to(tree)) for path in paths if path.suffix in (".py", ".pyi")}
    sources = {name.removeprefix("engine/alias/") for name in sources}  # the other name lies beside the package
    assert sources - set(wheel_names) == set()


def test_wheel_holds_an_extension_for_every_pyx_and_what_frameworks_load(wheel_names: list[str], tree: Path) -> None:
    modules = {name.split(".")[0] for name in wheel_names if name.endswith(".so")}
    sources = [*(tree / "engine_ext").rglob("*.pyx"), *(tree / "engine_ext" / "bindings").glob("*.c")]
    assert modules == {str(path.relative_to(tree).with_suffix("")) for path in sources}


def test_wheel_is_typed_and_licensed(wheel_names: list[str]) -> None:
    assert {"autotune/py.typed", "engine/py.typed", "engine_ext/py.typed"} <= set(wheel_names)
    assert any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in wheel_names)


def test_wheel_holds_the_dashboards_and_not_their_sources(wheel_names: list[str], tree: Path) -> None:
    data = {path for suffix in ("json", "yml") for path in (tree / "grafana").rglob(f"*.{suffix}")}
    assert len(data) == 9
    installed = {name for name in wheel_names if "grafana" in name}
    assert installed == {f"engine/metrics/{path.relative_to(tree)}" for path in data}


def test_wheel_holds_the_kernels_for_gpus(wheel_names: list[str]) -> None:
    assert "engine_ext/gpu/kernels.ptx" in wheel_names


def test_wheel_holds_nothing_else(wheel_names: list[str]) -> None:
    expected = re.compile(
        r"(autotune|engine|engine_ext)/([\w/]+\.(py|pyi|so)|[\w/]+\.cpython-[\w-]+\.so|py\.typed)"
        r"|engine_ext/(gpu/kernels\.ptx|transport/carrier\.h)|enginerun(_torch)?\.py|engine/metrics/grafana/[\w/-]+\.(json|yml)|[^/]+\.dist-info/.+"
    )
    assert [name for name in wheel_names if not expected.fullmatch(name)] == []


def test_wheel_puts_nothing_of_that_name_where_horovod_is_imported_from(wheel_names: list[str]) -> None:
    assert [name for name in wheel_names if re.search(r"(^|/)horovod(/|\.|$)", name)] == []
    assert "engine/compat/startup/sitecustomize.py" in wheel_names
    assert [name for name in wheel_names if name.startswith("sitecustomize")] == []


def test_wheel_names_the_command_and_its_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    files = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
    entries = archive.read(files["entry_points.txt"]).decode()
    assert "enginerun = engine.launch.cli:main" in entries and "autotune = autotune.cli:main" in entries
    assert "horovodrun = engine.launch.cli.horovodrun:main" in entries
    assert "License-Expression: Apache-2.0" in archive.read(files["METADATA"]).decode()


@pytest.mark.slow
def test_sdist_holds_what_is_committed(sdist: Path, tree: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "meson.build", "pyproject.toml", "constraints.txt", "PKG-INFO"} <= names
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True)
    committed = set(filter(None, listed.stdout.split("\0")))
    assert {name for name in names if "." in Path(name).name} - committed - {"PKG-INFO"} == set()


def test_extensions_link_only_the_libc_family(wheel: Path, tmp_path: Path) -> None:
    """Libraries of frameworks and vendors are found at run time, so that one build serves all of their versions."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    extensions = sorted(tmp_path.rglob("*.so"))
    assert extensions
    for extension in extensions:
        section = subprocess.run(["readelf", "-dW", extension], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", section)
        assert [library for library in needed if not LIBC_FAMILY.fullmatch(library)] == [], extension.name
        assert not re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", section), extension.name
