"""A build's Cython, loaded once, translates as a new process of it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("Cython", reason="needs the dev extra")

from ..waiting import until
from .environments import ROOT

SOURCES = "cdef extern from 'math.h':\n    double cos(double)\n\n\ndef compute(double x):\n    return cos(x)\n"
BEGIN = """
import contextlib, os, subprocess, sys
from cython_client import ADDRESS, make_command
from cython_server import serve_cython
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with a good and a bad module, the current one meanwhile."""
    (tmp_path / "good.pyx").write_text(SOURCES)
    (tmp_path / "bad.pyx").write_text("def compute(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": str(ROOT / "tools"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", BEGIN + code]
    return subprocess.run(
        command, env=os.environ | paths | environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_server_translates_as_cython_does(folder: Path) -> None:
    """Equal bytes, and the list of what they were made from, for modules that are asked for at the same time."""
    names = [f"module{number}" for number in range(8)]
    for name in names:
        (folder / f"{name}.pyx").write_text(SOURCES)
    done = run_python(f"""
with serve_cython():
    asked = [subprocess.Popen([*make_command(), "-M", "-3", name + ".pyx", "-o", name + ".c"]) for name in {names}]
    assert [each.wait() for each in asked] == [0] * len(asked)
assert ADDRESS not in os.environ
""")
    assert (done.returncode, done.stderr) == (0, "")
    kept = [(folder / f"{name}.c").read_bytes() for name in names]
    lists = [(folder / f"{name}.c.dep").read_bytes() for name in names]
    for name in names:
        command = [Path(sys.executable).with_name("cython"), "-M", "-3", f"{name}.pyx", "-o", f"{name}.c"]
        subprocess.run(command, check=True, timeout=60)
    assert [(folder / f"{name}.c").read_bytes() for name in names] == kept
    assert [(folder / f"{name}.c.dep").read_bytes() for name in names] == lists


def test_errors_are_those_of_cython(folder: Path) -> None:
    asked = run_python("""
with serve_cython():
    sys.exit(subprocess.run([*make_command(), "-3", "bad.pyx"]).returncode)
""")
    plain = run_python("sys.exit(subprocess.run(['cython', '-3', 'bad.pyx']).returncode)")
    assert "bad.pyx:1:12" in asked.stderr
    assert (
        (asked.returncode, asked.stdout, asked.stderr) == (plain.returncode, plain.stdout, plain.stderr) != (0, "", "")
    )


@pytest.mark.parametrize("address", ["", "gone/socket"])
def test_without_a_server_the_program_is_cython(folder: Path, address: str) -> None:
    """An edit of an editable install is built so, and a build whose server has died goes on."""
    done = run_python("sys.exit(subprocess.run([*make_command(), '-3', 'good.pyx']).returncode)", CYTHON_SERVER=address)
    assert done.returncode == 0, done.stderr
    assert "__pyx_" in (folder / "good.c").read_text()


def test_a_client_of_a_server_that_was_killed_is_cython(folder: Path) -> None:
    done = run_python("""
import multiprocessing
with serve_cython():
    [server] = multiprocessing.active_children()
    server.kill()
    server.join()
    sys.exit(subprocess.run([*make_command(), "-3", "good.pyx"], timeout=90).returncode)
""")
    assert done.returncode == 0, done.stderr
    assert "__pyx_" in (folder / "good.c").read_text()


def test_a_server_ends_with_a_build_that_was_killed(folder: Path) -> None:
    done = run_python(
        """
import multiprocessing
with serve_cython():
    [server] = multiprocessing.active_children()
    subprocess.run([*make_command(), "-3", "good.pyx"], check=True)
    os.write(1, b"%d" % server.pid)
    os.kill(os.getpid(), 9)
""",
        TMPDIR=str(folder),
    )
    assert done.returncode == -9, done.stderr
    stat = Path(f"/proc/{done.stdout}/stat")
    until(lambda: not stat.exists() or ") Z " in stat.read_text(), "the server has ended")


def test_a_server_leaves_nothing(folder: Path) -> None:
    done = run_python(
        """
with serve_cython():
    place = os.path.dirname(os.environ[ADDRESS])
    assert os.path.exists(place)
    print(place, end="")
with contextlib.suppress(ChildProcessError):  # raised where no child is left
    sys.exit(f"left: {os.waitpid(-1, os.WNOHANG)}")
""",
        TMPDIR=str(folder),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder))
    assert not os.path.exists(done.stdout)


def test_a_directory_too_deep_for_a_socket_has_no_server(folder: Path) -> None:
    deep = folder / ("deep" * 30)
    deep.mkdir()
    done = run_python(
        """
with serve_cython():
    assert ADDRESS not in os.environ
    sys.exit(subprocess.run([*make_command(), "-3", "good.pyx"]).returncode)
""",
        TMPDIR=str(deep),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(deep.iterdir())
