"""System calls that Python may lack or systems may refuse, features that hosts may lack, and a rank's stacks."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import config
from engine.errors import ConfigError
from engine.host import linux, machine, stacks
from engine.launch import cli
from engine.launch.errors import LaunchError
from engine.launch.process import spawn
from engine.tuning.process import TunerError, TunerProcess


@pytest.fixture(params=["offered", "missing"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with Python as it is, and as one built without the calls."""
    if request.param == "missing":
        for name in ("memfd_create", "pidfd_open"):
            monkeypatch.delattr(os, name, raising=False)


@pytest.mark.usefixtures("python")
def test_memory_without_a_name() -> None:
    descriptor = linux.memfd_create("some name")
    try:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == "/memfd:some name (deleted)"
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("python")
def test_a_descriptor_of_a_process_tells_of_its_end() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        descriptor = linux.pidfd_open(process.pid)
        try:
            assert not os.get_inheritable(descriptor)
            assert select.select([descriptor], [], [], 0)[0] == []
            process.communicate(b"\n")
            assert select.select([descriptor], [], [], 20)[0] == [descriptor]
        finally:
            os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(process.pid)


def test_a_refusal_says_how_to_mend_it() -> None:
    for number in (errno.EPERM, errno.ENOSYS):
        text = linux.explain_refusal("pidfd_open", OSError(number, os.strerror(number)))
        assert "refuses pidfd_open" in text and "Linux 5.3" in text and "seccomp=unconfined" in text
    assert "ulimit -n" in linux.explain_refusal("pidfd_open", OSError(errno.EMFILE, "Too many open files"))
    assert "seccomp" not in linux.explain_refusal("memfd_create", OSError(errno.ENOMEM, "Cannot allocate memory"))


def test_a_tuner_that_is_refused_its_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(linux, "memfd_create", refused)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TunerError, match="the system refuses memfd_create"):
        TunerProcess()
    assert os.listdir("/proc/self/fd") == before


CURRENT = "Current thread 0x1 (most recent call first):\n"
STACKS = """Thread 0x00007f0000000001 (most recent call first):
  File "other.py", line 1 in worker

Current thread 0x00007f0000000002 [python] (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
  File "/opt/x/site-packages/loader/next.py", line 7 in fetch
  File "/home/me/train.py", line 41 in load_batch
  File "/home/me/train.py", line 90 in <module>
"""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (STACKS, "train.py:41 in load_batch"),
        (STACKS + "\nThread 0x00007f0000000003 (most recent call first):\n" + '  File "z.py", line 3 in f\n', None),
        (STACKS + STACKS.replace("line 41", "line 42"), "train.py:42 in load_batch"),
        (
            "Fatal Python error: Aborted\n\n" + CURRENT + '  File "a", line 2 in b',
            "a:2 in b",
        ),
        (
            CURRENT + '  File "/usr/lib/python3.12/x.py", line 5 in y\n',
            "x.py:5 in y",
        ),
        (CURRENT + "  <no Python frame>\n", "None"),
        ("", "None"),
    ],
)
def test_the_innermost_line_of_the_users_own(tmp_path: Path, text: str, place: str | None) -> None:
    path = tmp_path / stacks.NAME
    path.write_text(text)
    assert str(stacks.find_position(path)) == (place or "train.py:41 in load_batch")
    assert stacks.has_stacks(path) == bool(text)


KEEPS = """
import faulthandler, os, signal, sys
from pathlib import Path
from engine.host import stacks
handled = []
signal.signal(stacks.SIGNAL, lambda *_: handled.append(1))
with open(sys.argv[1] + "/mine", "w") as mine:
    faulthandler.enable(mine)
    stacks.enable_stacks(Path(sys.argv[1]), 0)
    signal.raise_signal(stacks.SIGNAL)
    assert handled == [1]
    os.abort()
"""


def test_handlers_of_the_program_stay(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    done = subprocess.run([sys.executable, "-c", KEEPS, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "Aborted" in (tmp_path / "mine").read_text()
    assert (tmp_path / "rank.0" / stacks.NAME).read_text() == ""


def test_who_asks_late_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    code = "import faulthandler, signal, sys\nfrom pathlib import Path\nfrom engine.host import stacks\n"
    code += "stacks.enable_stacks(Path(sys.argv[1]), 0); faulthandler.unregister(stacks.SIGNAL)\n"
    code += "signal.raise_signal(stacks.SIGNAL); print('lives')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == "lives\n", done.stderr


@pytest.fixture
def removed_directory(tmp_path: Path) -> Iterator[None]:
    """Make the working directory of this process a removed one."""
    before, gone = os.getcwd(), tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.usefixtures("removed_directory")
def test_a_working_directory_that_was_removed_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ENGINE_TIMELINE", "ENGINE_AUTOTUNE_LOG", "ENGINE_NCCL_LIBRARY"):
        with pytest.raises(ConfigError, match=f"{name} is 'own'; expected .*working directory .* has been removed"):
            config.load({name: "own"})
        assert config.load({name: "/own/./file"})
    commands = [["true"], ["--timeline=t.json", "true"], ["--output-dir=out", "true"], ["--min-np=1", "true"]]
    for command in commands:
        assert cli.main(["-np", "1", *command]) == 2
        told = capsys.readouterr().err
        assert "the working directory of this process has been removed" in told and told.count("\n") == 1, told


@pytest.mark.parametrize("missing", [(), ("127.0.0.1",), ("127.0.0.1", "")])
def test_a_free_port_is_found_on_a_host_without_a_loopback(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET and address[0] in missing:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
            super().bind(address)

    monkeypatch.setattr(machine.socket, "socket", Socket)
    assert 0 < machine.free_port() < 1 << 16


def test_a_host_without_any_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(machine.socket, "socket", refuse)
    with pytest.raises(LaunchError, match=r"no TCP port can be had on this host \(Address family not supported"):
        spawn.find_port()


def test_an_empty_input_is_empty_where_dev_null_is_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is one in some containers, and where a program that ran as root has replaced it."""
    plain = tmp_path / "null"
    plain.write_text("what others wrote")
    for device in (os.devnull, str(plain)):
        monkeypatch.setattr(os, "devnull", device)
        descriptor = linux.open_empty_input()
        assert os.read(descriptor, 100) == b"" and not os.get_inheritable(descriptor)
        os.close(descriptor)
