"""Wheels of a release: what they are called, equal bytes from equal files, and what an inspection refuses."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tools.release import trial
from tools.release.archive import pack_wheel, read_metadata
from tools.release.headers import Headers, write_build_details
from tools.release.targets import TARGETS, Target, select_targets

from .environments import ROOT

pytest.importorskip("elftools", reason="needs the dev extra")

from tools.release import __main__ as builder
from tools.release import materials
from tools.release.inspection import BadWheelError, inspect_wheel

HERE = Target("{}.{}".format(*sys.version_info[:2]), os.uname().machine)
EPOCH = 1_700_000_000
HEADERS = Headers("3.11.2", (Path("/include"),), "a test")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Directory with a module, an extension module of another package, and a license in the sources beside it."""
    site = tmp_path / "site"
    (site / "engine_ext").mkdir(parents=True)
    (site / "engine_ext" / "errors.py").write_text("text = 1\n")
    return site


def add_extension(site: Path, name: str, *flags: str) -> None:
    """Compile an empty library into the site, with the compiler that builds the engine."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    source = site.parent / "empty.c"
    source.write_text("int engine_nothing(void) { return 0; }\n")
    command = [compiler, "-shared", "-fPIC", "-o", site / "engine_ext" / name, source, *flags]
    subprocess.run(command, check=True, timeout=60)


def test_names_of_wheels_are_those_that_pip_looks_for() -> None:
    tag = pytest.importorskip("packaging.tags")
    wheel = Target("3.14t", "aarch64")
    assert wheel.tag == "cp314-cp314t-manylinux_2_28_aarch64"
    assert wheel.suffix == ".cpython-314t-aarch64-linux-gnu.so"
    supported = {f"{each.interpreter}-{each.abi}" for each in tag.cpython_tags(sys.version_info[:2], platforms=["any"])}
    assert HERE.tag.rpartition("-")[0] in supported
    assert HERE.suffix == sysconfig.get_config_var("EXT_SUFFIX")


def test_wheels_are_chosen_by_parts_of_their_names() -> None:
    assert [each.name for each in select_targets(["cp314t"])] == ["cp314t-x86_64", "cp314t-aarch64"]
    assert len(select_targets(["aarch64", "cp311-aarch64"])) == 6
    assert select_targets([]) == list(TARGETS.values())
    assert "cp313t-x86_64" not in TARGETS  # of an experimental Python: for trials, by its whole name
    assert [each.name for each in select_targets(["cp313t-x86_64"])] == ["cp313t-x86_64"]
    with pytest.raises(ValueError, match="there is no wheel 'cp310'; there are: cp311-x86_64, "):
        select_targets(["cp310"])


def test_equal_files_make_equal_wheels_whenever_and_wherever(site: Path, tmp_path: Path) -> None:
    one = pack_wheel(site, ROOT, HERE, tmp_path / "one", EPOCH)
    other = tmp_path / "elsewhere"
    shutil.copytree(site, other)
    os.utime(other / "engine_ext" / "errors.py", (1, 1))
    (other / "engine_ext" / "errors.py").chmod(0o600)
    two = pack_wheel(other, ROOT, HERE, tmp_path / "two", EPOCH)
    assert one.read_bytes() == two.read_bytes()
    assert pack_wheel(site, ROOT, HERE, tmp_path / "three", EPOCH + 60).read_bytes() != one.read_bytes()


def test_metadata_is_that_of_an_installation_from_sources(site: Path, wheel: Path, tmp_path: Path) -> None:
    """The release packs by itself what meson-python packs for everyone else."""
    released = zipfile.ZipFile(pack_wheel(site, ROOT, HERE, tmp_path, EPOCH))
    usual = zipfile.ZipFile(wheel)
    for name in ("METADATA", "licenses/LICENSE"):
        [path] = [each for each in usual.namelist() if each.endswith(f".dist-info/{name}")]
        assert released.read(path) == usual.read(path)
    [path] = [each for each in usual.namelist() if each.endswith("entry_points.txt")]
    texts = [archive.read(path).decode().split() for archive in (released, usual)]
    assert sorted(texts[0]) == sorted(texts[1])


def test_inspection_passes_a_plain_wheel(site: Path, tmp_path: Path) -> None:
    add_extension(site, f"core{HERE.suffix}", "-s", "-nostdlib")
    made = pack_wheel(site, ROOT, HERE, tmp_path, EPOCH)
    assert "1 libraries" in inspect_wheel(made, HERE, [str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["-nostdlib"], "has symbols"),
        (["-s", "-nostdlib", "-Wl,-rpath,/somewhere"], "searches ('/somewhere',)"),
        (["-s", "-Wl,--no-as-needed", "-lgcc_s"], "links ('libgcc_s.so.1', 'libc.so.6')"),
    ],
)
def test_inspection_refuses_a_library_that_is_not_for_everyone(
    site: Path, tmp_path: Path, flags: list[str], complaint: str
) -> None:
    add_extension(site, f"core{HERE.suffix}", *flags)
    made = pack_wheel(site, ROOT, HERE, tmp_path, EPOCH)
    with pytest.raises(BadWheelError) as refused:
        inspect_wheel(made, HERE, [])
    assert complaint in str(refused.value)


def test_inspection_refuses_a_wheel_of_another_target_and_one_that_tells_where_it_was_built(
    site: Path, tmp_path: Path
) -> None:
    add_extension(site, f"core{HERE.suffix}", "-s", "-nostdlib")
    (site / "engine_ext" / "errors.py").write_text(f"# {tmp_path}\n")
    made = pack_wheel(site, ROOT, HERE, tmp_path, EPOCH)
    with pytest.raises(BadWheelError, match=r"errors.py has the text"):
        inspect_wheel(made, HERE, [str(tmp_path)])
    other = Target(HERE.python, "aarch64" if HERE.machine == "x86_64" else "x86_64")
    with pytest.raises(BadWheelError, match=f"is for {HERE.machine}"):
        inspect_wheel(made, other, [])


def test_a_wheel_that_is_not_fit_leaves_the_directory_and_its_list(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "WORK", tmp_path / "work")
    out = tmp_path / "out"
    wheels = [pack_wheel(site, ROOT, target, out, EPOCH) for target in (HERE, TARGETS["cp314t-aarch64"])]
    builder.write_sums(out)
    assert [line.split("  ")[1] for line in (out / "SHA256SUMS").read_text().splitlines()] == sorted(
        wheel.name for wheel in wheels
    )
    builder.remove_wheel(HERE, out)
    builder.write_sums(out)
    digest = hashlib.sha256(wheels[1].read_bytes()).hexdigest()
    assert (out / "SHA256SUMS").read_text() == f"{digest}  {wheels[1].name}\n"
    assert (tmp_path / "work" / "rejected" / wheels[0].name).exists()


def test_the_list_of_digests_is_written_where_no_wheel_could_be_built(tmp_path: Path) -> None:
    builder.write_sums(tmp_path / "dist")
    assert (tmp_path / "dist" / "SHA256SUMS").read_text() == ""


def test_bill_of_materials_lists_what_the_wheel_holds_links_and_needs(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_extension(site, f"core{HERE.suffix}", "-s", "-Wl,--no-as-needed", "-lc")
    made = pack_wheel(site, ROOT, HERE, tmp_path, EPOCH)
    monkeypatch.setattr(materials, "_TOOLS", ("meson",))  # the others are installed by `make wheels`
    text = materials.describe_materials(made, read_metadata(ROOT), HEADERS, "0" * 40, EPOCH)
    assert text == materials.describe_materials(made, read_metadata(ROOT), HEADERS, "0" * 40, EPOCH)
    bill = json.loads(text)
    found = {each["bom-ref"]: each for each in bill["components"]}
    assert bill["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(made.read_bytes()).hexdigest()
    inside = zipfile.ZipFile(made).read(f"engine_ext/core{HERE.suffix}")
    assert found[f"file:engine_ext/core{HERE.suffix}"]["hashes"][0]["content"] == hashlib.sha256(inside).hexdigest()
    assert {"linked:libc.so.6", "pypi:numpy"} <= set(found)
    assert bill["dependencies"] == [{"ref": "wheel", "dependsOn": ["linked:libc.so.6", "pypi:numpy"]}]


def test_a_build_asks_no_interpreter_of_the_target(tmp_path: Path) -> None:
    details = tmp_path / "build-details.json"
    write_build_details(Target("3.14t", "aarch64"), HEADERS, details)
    read = json.loads(details.read_text())
    assert read["abi"]["extension_suffix"] == ".cpython-314t-aarch64-linux-gnu.so"
    assert read["c_api"]["headers"] == "/include" and read["abi"]["flags"] == ["t"]


def test_the_script_that_wheels_are_tried_with_is_that_of_the_readme() -> None:
    script = trial.read_readme_script()
    assert script.startswith("import engine.torch\nimport torch\n") and "engine.init()\n" in script
    first = script.replace(*trial._FIRST_STEP)
    assert first != script and "raise SystemExit" in first
    compile(first, "first.py", "exec")


def test_emulated_tests_need_no_torch_and_each_pattern_leaves_some_out() -> None:
    """A file that needs torch would be skipped as a whole, and a stale pattern would leave out nothing."""
    texts = [(ROOT / file).read_text() for file in trial._TESTS]
    assert not any("needs_torch" in text for text in texts)
    for pattern in trial._LEFT_OUT:
        assert any(re.search(rf"def \w*{pattern.split()[0]}", text) for text in texts), pattern


def test_python_without_its_lock_is_refused_with_the_mend() -> None:
    """The engine's state is guarded by the lock. Python turns it on for the engine unless a user forbids that."""
    program = "import sys; sys._is_gil_enabled = lambda: False; import engine.native"
    done = subprocess.run([sys.executable, "-c", program], cwd="/", text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert "PYTHON_GIL=0 or -X gil=0" in done.stderr and "Remove that setting" in done.stderr
