"""Messages between rank 0 and the tuner's process: answers, and refusals of invalid messages."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autotune import daemon, journal
from autotune.replay import replay_log
from autotune.session import LIMIT, Session, SessionError
from engine.host import processes
from engine.tuning import process as tuner_process
from engine.tuning.process import TunerError, TunerProcess

from ..waiting import until

BEGIN: dict[str, Any] = {
    "type": "begin",
    "space": {"size": {"kind": "Integer", "low": 1, "high": 1024, "log": True}},
    "default": {"size": 512},
    "first": [{"size": 64}],
    "seed": 3,
    "max_trials": 8,
    "log": None,
    "about": {"ranks": 2},
    "cpus": [],
}


def packed(version: int = 2, **message: Any) -> bytes:
    return json.dumps({"version": version, **message}).encode()


def seconds(size: int) -> float:
    return 0.1 + 0.01 * abs(size.bit_length() - 6)


def searched(session: Any, **begin: Any) -> dict[str, Any]:
    """Drive a search to its end."""
    answer = session(**{**BEGIN, **begin})
    while answer["type"] == "trial":
        time_ = seconds(answer["knobs"]["size"])
        samples = [time_ * (1 + 0.001 * k) for k in range(5)]
        answer = session(type="told", id=answer["id"], status="ok", samples=samples)
    return dict(answer)


def test_a_search_by_messages(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for name in ("log.jsonl", "log.2.jsonl", "log.3.jsonl"):  # one log is one search
        session = Session()
        done = searched(lambda s=session, **message: json.loads(s.answer_message(packed(**message))), log=str(log))
        assert done["type"] == "done" and done["log"] == str(tmp_path / name)
        rows = journal.read(tmp_path / name)
        assert replay_log(rows).exact
        assert [row["knobs"]["size"] for row in rows if row["row"] == "ask"][:2] == [512, 64]
        assert rows[-1]["knobs"] == done["best"] and done["trials"] == rows[-1]["trials"] <= 8
        assert done["gain"] > 0.15 and 0 < done["sure"] < done["gain"]
    steady = [seconds(done["best"]["size"])] * 9
    assert json.loads(session.answer_message(packed(type="observe", samples=steady)))["type"] == "watching"
    slower = packed(type="observe", samples=[3 * steady[0]] * 9)
    answers = [json.loads(session.answer_message(slower))["type"] for _ in range(3)]
    assert answers[-1] == "trial"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x00\xff", "malformed"),
        (b"[" * 50_000, "malformed"),
        (b"[1]", "it is an object of JSON, not list"),
        (packed(1, type="begin"), "version 1; this tuner speaks 2"),
        (packed(), "it has no type"),
        (packed(type=["begin"]), "it has no type"),
        (packed(type="answer"), "'answer' is not expected first"),
        (packed(type="told", id=0, status="ok", samples=[1.0]), "'told' is not expected first"),
        (packed(type="begin"), "'begin' lacks 'space'"),
        (packed(**BEGIN | {"space": {"size": {"kind": "Unknown"}}}), "knob 'size' is not described"),
        (packed(**BEGIN | {"default": {"size": 0}}), "the default has a bad 'size'"),
        (packed(**BEGIN | {"log": "/proc/none/log"}), "cannot write /proc/none/log"),
    ],
)
def test_junk_is_told_what_is_wrong_with_it(data: bytes, says: str) -> None:
    with pytest.raises(SessionError, match=says):
        Session().answer_message(data)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"type": "begin"}, "'begin' is not expected now"),
        ({"type": "told", "id": 7, "status": "ok", "samples": [1.0]}, "trial 7 is not waiting"),
        ({"type": "told", "id": 0, "status": "ok", "samples": []}, "no samples"),
        ({"type": "told", "id": 0, "status": "ok", "samples": "x"}, "makes no sense"),
        (
            {"type": "told", "id": 0, "status": "ok", "samples": [float("nan")]},
            "a message is malformed: NaN is no number of JSON",
        ),
        ({"type": "told", "id": 0}, "lacks 'samples'"),
    ],
)
def test_junk_in_a_search_is_told_so_too(message: dict[str, Any], says: str) -> None:
    session = Session()
    session.answer_message(packed(**BEGIN))
    with pytest.raises(SessionError, match=says):
        session.answer_message(packed(**message))


@pytest.mark.parametrize(("data", "says"), [(b" " * (LIMIT + 1), f"longer than {LIMIT} bytes"), (b"{", "malformed")])
def test_the_process_ends_with_the_reason(data: bytes, says: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        codes: list[int] = []
        server = threading.Thread(target=lambda: codes.append(daemon.serve(theirs)), daemon=True)
        server.start()
        ours.send(data)
        answer = json.loads(ours.recv(LIMIT))
        server.join(60)
    assert answer["type"] == "failed" and says in answer["reason"]
    assert codes == [2]


# The process as rank 0 starts it


def test_a_search_by_the_process_that_ends_with_its_socket() -> None:
    with TunerProcess() as process:
        status = Path(f"/proc/{process.pid}/status").read_text()
        done = searched(lambda **message: process.send_request(message, 60.0), cpus=sorted(os.sched_getaffinity(0)))
        descriptors = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert process.send_request({"type": "observe", "samples": [0.1]}, 60.0) == {"version": 2, "type": "watching"}
        niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        assert process.send_request({"type": "observe", "samples": [0.1]}, 60.0)["type"] == "watching"
        pid = process.pid
    assert done["type"] == "done"
    assert niceness == min(os.getpriority(os.PRIO_PROCESS, 0) + daemon.NICE, 19)
    assert sorted(each.partition(":")[0] for each in descriptors) == ["/dev/null", *["/memfd"] * 2, "socket"]
    assert "Threads:\t1\n" in status
    assert not Path(f"/proc/{pid}").exists()


ANSWERS = {
    'send(b\'{"version": 9, "type": "trial"}\')': "speaks version 9 of the protocol, and rank 0 2",
    "send(b'nonsense')": "has sent a malformed message: no JSON: Expecting value",
    "send(b'[]')": "malformed message: it is no object",
    f"send(b' ' * {LIMIT + 1})": f"has sent a message of more than {LIMIT} bytes",
    'send(b\'{"version": 2, "type": "failed", "reason": "so it is"}\')': "so it is",
    "sys.exit('out of luck')": "has ended with exit code 1: out of luck",
    "os.kill(os.getpid(), 9)": "was killed by SIGKILL",
    "time.sleep(600)": "has not answered for 2 s",
    "s.close(); time.sleep(600)": "has closed its socket",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("does", ANSWERS)
def test_whatever_the_process_does_is_one_error_within_the_time(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os, socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); send = s.send; s.recv(99999); "

    def fake(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-S", "-c", source + does, *arguments], dict(os.environ)

    monkeypatch.setattr(tuner_process, "make_command", fake)
    with TunerProcess() as process:
        began = time.monotonic()
        with pytest.raises(TunerError, match=ANSWERS[does]):
            process.send_request({"type": "begin"}, 2.0 if "2 s" in ANSWERS[does] else 60.0)
        assert time.monotonic() - began < 60.0
        pid = process.pid
    assert not Path(f"/proc/{pid}").exists()


def test_an_interpreter_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(TunerError, match=r"the tuner's process cannot be started: .*No such file"):
        TunerProcess()


@pytest.mark.sample(1)
@pytest.mark.parametrize("stopped", [False, True])
def test_the_process_dies_with_its_parent(stopped: bool) -> None:
    source = (
        "from engine.tuning.process import TunerProcess as T; t = T(); t.send_request(%r, 60); "
        "print(t.pid, flush=True); input()"
    )
    command = [sys.executable, "-P", "-c", source % BEGIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    until(lambda: (found := processes.read_process(pid)) is None or found.state == "Z", "the tuner has ended")


def test_the_secret_of_the_job_stays_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_SECRET", "x")
    monkeypatch.setenv("ENGINE_JOB", "y")
    environ = tuner_process.make_command("autotune.daemon")[1]
    assert "ENGINE_SECRET" not in environ and environ["ENGINE_JOB"] == "y"
