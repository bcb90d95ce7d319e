"""Jobs on several hosts: agents start the ranks, and no process is left on any host, whatever happens."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.host import network, processes
from engine.launch.cli.doctor import examine_host, list_differences, try_connections
from engine.launch.hosts.channel import Channel, Message

from ..metrics.fake_pages import training
from ..metrics.written_pages import content
from ..waiting import marked, until
from .host_jobs import agent_of, need_namespaces, on_hosts, other_python, stand_in_ssh
from .launch_jobs import DEADLINE, Launcher

STAND_IN = ("--launch-agent", "env STAND_IN={host}")
PLACE = """
    import json
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HUB JOB INTERFACE".split()
    print(json.dumps({name: os.environ.get(f"ENGINE_{name}") for name in names}), os.environ["MASTER_ADDR"])
"""
WAITS = """
    (here / f"pid.{rank}").write_text(str(os.getpid()))
    subprocess.Popen(["sleep", "600"]); subprocess.Popen(["sleep", "600"], start_new_session=True)
    touch(f"up.{rank}")
    while True: linger()
"""
HANGS_ON = 10.0  # seconds; the launcher waits 15 s for an ssh that does not end by itself
UP = ("up.0", "up.1", "up.2", "up.3")


def started(launcher: Launcher, *arguments: object, python: str = WAITS) -> subprocess.Popen[bytes]:
    """Start a job of four ranks on two hosts; return when all have touched their file."""
    process = launcher.start("-H", "a:2,b:2", *STAND_IN, *arguments, python=python)
    launcher.wait_for(*UP)
    return process


def test_ranks_run_on_their_hosts_with_their_places(launcher):
    job = on_hosts(launcher, "--network-interface", "lo", python=PLACE, hosts="a:2,b:1,c:2")
    assert job.code == 0, job.err
    told = [json.loads(job.lines(rank)[0].rpartition(" ")[0]) for rank in range(5)]
    assert [(each["RANK"], each["LOCAL_RANK"], each["LOCAL_SIZE"], each["CROSS_RANK"]) for each in told] == [
        ("0", "0", "2", "0"),
        ("1", "1", "2", "0"),
        ("2", "0", "1", "1"),
        ("3", "0", "2", "2"),
        ("4", "1", "2", "2"),
    ]
    assert {(each["SIZE"], each["CROSS_SIZE"], each["INTERFACE"]) for each in told} == {("5", "3", "lo")}
    assert len({each["JOB"] for each in told}) == len({each["HUB"] for each in told}) == 1
    assert told[0]["HUB"].startswith("127.0.0.1:") and job.lines(4)[0].endswith(" 127.0.0.1")
    assert "enginerun: b: 1 rank on " in job.err
    assert launcher.kept() == []


def test_the_first_host_listens_before_any_rank_starts(launcher):
    program = """
        import socket
        if rank == 0:
            with socket.socket(fileno=int(os.environ["ENGINE_HUB_FD"])) as listening:
                listening.settimeout(20)
                got = sorted(listening.accept()[0].recv(1).decode() for _ in range(3))
            print("".join(got))
        else:
            assert "ENGINE_HUB_FD" not in os.environ
            port = int(os.environ["ENGINE_HUB"].rpartition(":")[2])
            socket.create_connection(("127.0.0.1", port), 20).sendall(str(rank).encode())
    """
    job = on_hosts(launcher, python=program)
    assert job.code == 0, job.err
    assert job.lines(0) == ["123"]


def test_a_job_that_other_hosts_alone_run_has_no_hub(launcher):
    job = on_hosts(launcher, python="print('ENGINE_HUB' in os.environ)", hosts="a:2")
    assert (job.code, job.lines(0)) == (0, ["False"])


def test_the_secret_is_on_no_command_line(launcher):
    process = started(launcher)
    rank = int((launcher.home / "pid.0").read_text())
    variables = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    (secret,) = [each.partition(b"=")[2] for each in variables if each.startswith(b"ENGINE_SECRET=")]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked(launcher.mark)]
    assert len(secret) == 64 and lines and not [line for line in lines if secret in line or b"ENGINE_" in line]
    process.send_signal(signal.SIGINT)
    assert launcher.finish(process).code == 130


def test_output_comes_whole_in_order_and_is_kept(launcher):
    program = """
        for number in range(2000): print(number, "x" * 50)
        sys.stdout.write("no end of line"); sys.stdout.flush()
        os.write(2, b"\\xff\\0raw\\n")
    """
    job = on_hosts(launcher, "--output-dir", "out", python=program)
    assert job.code == 0, job.err
    for rank in range(4):
        lines = job.lines(rank)
        assert lines[:-1] == [f"{number} {'x' * 50}" for number in range(2000)]
        assert lines[-1] == "no end of line"
        assert (launcher.home / f"out/rank.{rank}/stderr").read_bytes() == b"\xff\0raw\n"
        assert (launcher.home / f"out/rank.{rank}/stdout").read_text().endswith("no end of line")


def test_a_failing_rank_is_named_with_its_host_and_gives_the_code(launcher):
    program = "if rank == 3: sys.exit('oh dear') or 7\nlinger()"
    job = on_hosts(launcher, "--grace-period", 0.2, python=program)
    assert job.code == 1
    assert job.failure[0].startswith("enginerun: first failure: rank 3 on b: exit code 1")
    assert job.failure[-1] == "  | oh dear"
    assert "enginerun: other ranks: ranks 0-2: ended by the launcher, killed by SIGTERM" in job.err
    assert (
        "a: ranks 0, 1 did not end within the grace period after the first rank failed (rank 3, exit code 1)" in job.err
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job(launcher):
    process = started(launcher, "--grace-period", 0.2)
    os.kill(int((launcher.home / "pid.2").read_text()), signal.SIGKILL)
    job = launcher.finish(process)
    assert job.code == 137
    assert job.failure[0].startswith("enginerun: first failure: rank 2 on b: killed by SIGKILL")


@pytest.mark.slow
def test_what_ranks_report_in_their_directories_comes_to_the_launcher(launcher):
    """Includes a host that does not see the launcher's directory: its agent has one of its own."""
    program = """
        home = pathlib.Path(os.environ["ENGINE_OUTPUT_DIR"])
        assert (home / f"rank.{rank}").is_dir() and (home / ".job").exists() == (rank == 0)
        if rank == 0:
            wait_for("written"); sys.exit(4)
        from engine.exit_report import writer
        (home / "rank.1" / "deep").mkdir(); (home / "rank.1" / "deep" / "file").write_bytes(b"x" * 3000000)
        writer.report_failure(0, "raised", "rank 0 failed: boom", time.time() - 100)
        (home / "rank.1" / "flight.json").write_text("{}"); touch("written"); linger()
    """
    # The second agent has a file system of its own over the directory for temporary files.
    mount = f'mount -t tmpfs none {launcher.temporary} && exec "$@"'
    far = f"""case "$0" in b) exec unshare -m sh -c '{mount}' sh "$@";; *) exec "$@";; esac"""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a mount namespace: run as root")
    command = ["-H", "a:1,b:1", "--launch-agent", f"sh -c {_quoted(far)} {{host}}", "--grace-period", 0.2]
    job = launcher.run(*command, python=program)
    assert job.code == 4, job.err
    (kept,) = launcher.kept()
    assert (kept / "rank.1/deep/file").read_bytes() == b"x" * 3000000
    assert f"flight records of rank 1: {kept}/rank.N/flight.json" in job.err
    assert "first failure: rank 0 on a: exit code 4" in job.failure[0]
    assert not (kept / ".job").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("chosen", [False, True], ids=["temporary", "chosen"])
def test_agents_may_share_a_directory_that_the_launcher_does_not_see(launcher, chosen):
    """One of the agents makes the directory, each sends its ranks' files, and none is left there."""
    program = """
        home = pathlib.Path(os.environ["ENGINE_OUTPUT_DIR"])
        assert not (home / ".job").exists() and (home / ".agents").exists()
        touch(f"up.{rank}"); wait_for("up.0", "up.1")
        assert (home / "rank.0").is_dir() and (home / "rank.1").is_dir()
        (home / f"rank.{rank}" / "large").write_bytes(bytes([rank]) * 3000000)
    """
    inside = launcher.home / "far"
    inside.mkdir()
    there = [launcher.temporary, inside]
    mounts = " && ".join(f"mount -t tmpfs none {each}" for each in there)
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{mounts} && echo up && exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with holder:
        assert holder.stdin is not None and holder.stdout is not None
        if holder.stdout.readline() != "up\n":
            pytest.skip("needs a mount namespace: run as root")
        options = ["--output-dir", inside / "out"] if chosen else ["--grace-period", 0.2]
        agent = f"nsenter -t {holder.pid} -m --wd={launcher.home} env STAND_IN={{host}}"
        job = launcher.run("-H", "a:1,b:1", "--launch-agent", agent, *options, python=program)
        left = subprocess.run(["nsenter", "-t", str(holder.pid), "-m", "find", *map(str, there)], capture_output=True)
        holder.stdin.close()
    assert job.code == 0, job.err
    assert left.stdout.decode().split() == [str(each) for each in there], left
    for rank in range(2) if chosen else ():
        assert (inside / f"out/rank.{rank}/large").read_bytes() == bytes([rank]) * 3000000


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_a_signal_reaches_the_ranks_of_all_hosts(launcher):
    program = """
        def end(*_): touch(f"signal.{rank}"); sys.exit(0)
        signal.signal(signal.SIGINT, end); signal.signal(signal.SIGUSR1, lambda *_: touch(f"usr1.{rank}"))
        touch(f"up.{rank}")
        while True: signal.pause()
    """
    process = started(launcher, python=program)
    process.send_signal(signal.SIGUSR1)
    launcher.wait_for("usr1.0", "usr1.1", "usr1.2", "usr1.3")
    process.send_signal(signal.SIGINT)
    job = launcher.finish(process)
    assert job.code == 130
    launcher.wait_for("signal.0", "signal.1", "signal.2", "signal.3")
    assert job.err.count("SIGINT: passed on to the ranks") == 1
    assert job.err.rstrip().endswith("ended by SIGINT") and "first failure" not in job.err


@pytest.mark.slow
def test_a_second_interrupt_kills_at_once_on_all_hosts(launcher):
    program = """
        signal.signal(signal.SIGINT, lambda *_: touch(f"int.{rank}")); touch(f"up.{rank}")
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        while True: linger()
    """
    process = started(launcher, "--grace-period", 600, python=program)
    process.send_signal(signal.SIGINT)
    launcher.wait_for("int.0", "int.1", "int.2", "int.3")
    process.send_signal(signal.SIGINT)
    assert launcher.finish(process).code == 130
    launcher.nothing_left()


def test_killing_the_launcher_leaves_no_process_on_any_host(launcher):
    process = started(launcher)
    assert len(marked(launcher.mark)) >= 4 * 3 + 2 * 2 + 1
    process.kill()
    process.communicate(timeout=DEADLINE)
    until(lambda: not marked(launcher.mark), "no process left", 10.0)


def test_killing_an_agent_leaves_no_process_and_names_its_host(launcher):
    process = started(launcher, "--grace-period", 0.2)
    os.kill(agent_of(launcher, "b"), signal.SIGKILL)
    job = launcher.finish(process)
    assert job.code == 137, job.err
    assert "enginerun: b was lost: its agent ended (killed by SIGKILL); ranks 2, 3 with it" in job.err
    assert "first failure: rank 2 on b: lost with its host, whose agent ended (killed by SIGKILL)" in job.failure[0]
    assert "other ranks: ranks 0, 1: ended by the launcher" in job.err
    assert "other ranks: rank 3: lost with its host" in job.err
    until(lambda: not marked(launcher.mark), "no process left", 10.0)


@pytest.mark.slow
def test_a_stopped_agent_does_not_keep_the_job_from_its_end(launcher):
    """The launcher gives the agent up when it does not answer in time; its ranks end as soon as it resumes."""
    process = started(launcher, "--grace-period", 0.1)
    agent = agent_of(launcher, "b")
    os.kill(agent, signal.SIGSTOP)
    try:
        os.kill(int((launcher.home / "pid.0").read_text()), signal.SIGKILL)
        job = launcher.finish(process)
    finally:
        os.kill(agent, signal.SIGCONT) if agent in marked(launcher.mark) else None
    assert job.code == 137
    assert "b was lost: its agent did not answer in time; ranks 2, 3 with it" in job.err
    assert "first failure: rank 0 on a: killed by SIGKILL" in job.failure[0]


def test_the_blamed_rank_of_another_host_is_asked_where_it_stands(launcher):
    program = """
        from engine.exit_report import writer
        if rank == 2:
            signal.signal(signal.SIGRTMIN + 9, lambda *_: touch("asked")); touch("ready")
            while True: signal.pause()
        wait_for("ready")
        if rank == 0:
            writer.report_failure(2, "stalled", "rank 2 withheld 'x'", time.time())
            sys.exit(4)
        linger()
    """
    job = on_hosts(launcher, "--grace-period", 1, python=program)
    assert "first failure: rank 2 on b: stood still; the launcher ended it" in job.failure[0]
    assert (launcher.home / "asked").exists()


# ---- the start


def test_hosts_that_cannot_take_part_are_told_with_what_was_tried_and_what_they_said(launcher):
    stand_in_ssh(launcher)
    job = launcher.run("-H", "strange:1,deaf:1,fine:1", "--start-timeout", 30, python="touch('ran')")
    assert job.code == 2
    assert ("enginerun: error: " in job.err and "of 3 hosts cannot take part" in job.err) or "strange: " in job.err
    assert "strange: ended (exit code 255); it said: ssh: Could not resolve hostname strange (tried: ssh -o " in job.err
    assert not (launcher.home / "ran").exists()
    assert launcher.kept() == []
    launcher.nothing_left()


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_given_up_after_the_start_timeout(launcher):
    stand_in_ssh(launcher)
    job = launcher.run("-H", "deaf:1,fine:1", "--start-timeout", 8, python="touch('ran')")
    assert job.code == 2
    assert "deaf: did not answer within 8 s; it said: still trying deaf (tried: ssh " in job.err
    assert not (launcher.home / "ran").exists()
    launcher.nothing_left()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--launch-agent", "env STAND_IN={host}", "--network-interface", "no0"],
            "--network-interface no0: this host has no interface no0; it has ",
        ),
        (["--launch-agent", "env", "--remote-directory", "/no/such"], "no working directory '/no/such'"),
        (["--launch-agent", "/no/such/command"], "cannot start '/no/such/command': No such file or directory"),
        (["--launch-agent", "env", "--remote-python", "/no/such/python"], "ended (exit code 127); it said: "),
        (["--launch-agent", "env", "--cpus-per-rank", "5000"], "--cpus-per-rank 5000 with 2 ranks needs 10000 CPUs"),
        (["--launch-agent", "echo {host}:"], "ended (exit code 0); it said: a: "),
    ],
)
def test_what_keeps_a_host_from_its_part_is_told_before_any_rank_starts(launcher, options, said):
    job = launcher.run("-H", "a:2,b:2", *options, python="touch('ran')")
    assert job.code == 2
    assert said in job.err, job.err
    assert not (launcher.home / "ran").exists() and launcher.kept() == []


def test_an_agent_that_does_not_speak_as_one_is_told_and_leaves_nothing(launcher):
    """Works even while much data is pending that such an agent does not read."""
    launcher.environment |= {f"LARGE_{number}": "x" * 100_000 for number in range(3)}
    strange = "\\0enginerun agent 2\\n" + "\\377" * 8
    agent = f"""sh -c 'case $0 in b) printf "{strange}"; read rest;; *) exec "$@";; esac' {{host}}"""
    said = "does not speak as an agent does: what it writes are no messages of an agent"
    job = launcher.run("-H", "a:1,b:1", "--launch-agent", agent, python="touch('ran')")
    assert job.code == 2 and f"enginerun: error: b: {said}" in job.err and "Traceback" not in job.err, job.err
    assert not (launcher.home / "ran").exists() and launcher.kept() == []
    job = launcher.run("doctor", "-H", "a,b", "--launch-agent", agent)
    assert job.code == 1 and f"b: its agent {said}" in job.out and "Traceback" not in job.err, job
    launcher.nothing_left()


def test_a_program_that_hosts_do_not_have_is_told_before_any_rank_starts(launcher):
    job = launcher.run("-H", "a:1", *STAND_IN, "no-such-program")
    assert job.code == 2
    assert "a: the command 'no-such-program' is not found on PATH" in job.err


def test_a_rank_that_cannot_be_started_is_told_and_leaves_nothing(launcher):
    """The failure shows only when the program is executed."""
    program = launcher.home / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    job = launcher.run("-H", "a:1,b:1", *STAND_IN, program)
    assert job.code == 2
    assert f"cannot start '{program}': No such file or directory; the interpreter in its first line" in job.err
    assert launcher.kept() == []
    launcher.nothing_left()


def test_an_interrupt_during_the_start_ends_it(launcher):
    """The job ends at once although ssh still tries to reach a host, and no directory is left."""
    stand_in_ssh(launcher)
    process = launcher.start("-H", "deaf:1,fine:1", python="touch('ran')")
    until(lambda: (launcher.home / "ssh.log").exists() and len(marked(launcher.mark)) > 2, "agents")
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    job = launcher.finish(process)
    assert time.monotonic() - asked < HANGS_ON
    assert job.code == 130 and not (launcher.home / "ran").exists(), job
    assert launcher.kept() == [] and "stdout" not in job.err
    launcher.nothing_left()


def test_ssh_starts_agents_with_the_environment_and_the_directory_of_the_launcher(launcher):
    stand_in_ssh(launcher)
    launcher.environment["MINE"] = "quite 'mine'"
    options = ["-p", 2222, "--ssh-options=-o User=x", "--remote-python", f"{sys.executable} -B"]
    job = launcher.run(
        "-H", "chatty:1,localhost:1", *options, python="print(os.getcwd(), os.environ['MINE'], sys.executable)"
    )
    assert job.code == 0, job.err
    assert job.lines(0) == job.lines(1) == [f"{launcher.home} quite 'mine' {sys.executable}"]
    (call,) = (launcher.home / "ssh.log").read_text().splitlines()
    assert call.startswith("-o User=x -p 2222 -o BatchMode=yes") and "MINE" not in call and "SECRET" not in call
    assert call.endswith(f"chatty {sys.executable} -B -P -m engine.launch.agent")


@pytest.mark.slow
def test_another_python_of_the_hosts_is_that_of_their_ranks(launcher):
    """There it replaces both `python` and the path of the launcher's Python; the launcher's own host keeps its own."""
    stand_in_ssh(launcher)
    python = other_python(launcher.home / "far")
    job = launcher.run("-H", "chatty:1,localhost:1", "--remote-python", python, python="print(sys.executable)")
    assert (job.code, job.lines(0), job.lines(1)) == (0, [python], [sys.executable]), job.err
    program = launcher.script("print(sys.executable)")
    job = launcher.run("-H", "chatty:1", "--remote-python", python, "python", program)
    assert (job.code, job.lines(0)) == (0, [python]), job.err


@pytest.mark.slow
def test_a_first_host_that_others_cannot_reach_by_its_name_is_refused(launcher):
    stand_in_ssh(launcher)
    job = launcher.run("-H", "localhost:1,fine:1", python="touch('ran')")
    assert job.code == 2 and not (launcher.home / "ran").exists()
    assert "--hosts: other hosts cannot reach 'localhost', and there is no way to 'fine'" in job.err


@pytest.mark.slow
def test_a_name_of_this_machine_for_which_ssh_fails_is_told_as_such(launcher):
    """Names that only /etc/hosts knows are not resolved beforehand; an unusual form of an address stands in for one."""
    stand_in_ssh(launcher)
    (launcher.home / "bin" / "ssh").write_text("#!/bin/sh\necho Permission denied >&2; exit 255\n")
    for arguments in (["-H", "127.1:1,strange:1", "true"], ["doctor", "-H", "127.1,strange"]):
        job = launcher.run(*arguments)
        (here,) = [line for line in (job.out + job.err).splitlines() if "127.1: " in line]
        assert "Permission denied" in here and here.endswith("127.1 is this machine: write localhost"), here
        assert (job.out + job.err).count("is this machine") == 1


# ---- what else


def test_doctor_tells_what_hosts_have_and_lack(launcher):
    stand_in_ssh(launcher)
    job = launcher.run("doctor", "-H", "localhost,fine,strange", "--start-timeout", 20)
    assert job.code == 1
    rows = {line.split()[0]: line.split() for line in job.out.splitlines()[:4]}
    assert list(rows) == ["host", "localhost", "fine", "strange"]
    assert rows["strange"][1:4] == ["-", "-", "-"]
    assert sys.version.split()[0] in rows["fine"]
    assert "strange: its agent ended (exit code 255); it said: ssh: Could not resolve hostname strange" in job.out


def test_doctor_tells_what_hosts_have_in_several_versions():
    one = {"version": "1", "python": "3.11.7", "frameworks": ["JAX 0.4", "PyTorch 2.13.0+cpu"]}
    two = {"version": "1", "python": "3.12.1", "frameworks": ["PyTorch 2.13.0+cpu"]}
    assert list(list_differences([one, one])) == []
    python, jax = list_differences([one, two, one])
    assert python == "versions of Python differ (3.11.7, 3.12.1): install the same on all hosts"
    assert jax.startswith("versions of JAX differ (0.4, none)")


@pytest.mark.slow
def test_doctor_uses_the_interface_for_the_first_host_too(launcher):
    hosts = ("a", "192.0.2.7")  # the second is reached by a route that is not the loopback, if there is any network
    options = ["--launch-agent", "env HOST={host}", "--network-interface", "lo"]
    job = launcher.run("doctor", "-H", ",".join(hosts), *options)
    assert job.code == 0, job.out + job.err
    for host in hosts:
        (row,) = [line.split() for line in job.out.splitlines() if line.split()[:1] == [host]]
        assert "127.0.0.1" in row and "1 of 1" in " ".join(row)


def test_doctor_reaches_a_host_while_others_are_silent():
    """All connections are tried at once: those before it have used up the time limit."""
    with ExitStack() as opened:
        answering = opened.enter_context(network.listen("127.0.0.1", 0, backlog=8))
        silent = opened.enter_context(network.listen("127.0.0.1", 0, backlog=0))
        for _ in range(3):  # fill its backlog, so that the system drops further attempts
            connection = opened.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(silent.getsockname())
        targets = {f"silent-{number}": silent.getsockname() for number in range(4)}
        found = try_connections({**targets, "answering": answering.getsockname()}, 1.0)
    assert found.pop("answering") == ("127.0.0.1", "")
    assert {why.partition(";")[0] for _, why in found.values()} == {"no answer from 127.0.0.1"} and len(found) == 4


def test_doctor_reaches_hosts_where_no_further_thread_is_allowed(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with network.listen("127.0.0.1", 0, backlog=8) as answering:
        found = try_connections(dict.fromkeys("abc", answering.getsockname()), 1.0)
    assert found == dict.fromkeys("abc", ("127.0.0.1", ""))


def test_doctor_examines_a_host_that_is_called_more_often_than_its_backlog_holds():
    """Each other host calls the first one twice; there may be 255 of them."""
    (ours, theirs), order = socket.socketpair(), Message("examine", {"interface": "lo"})
    agent, launcher = Channel(theirs.fileno(), theirs.fileno()), Channel(ours.fileno(), ours.fileno())
    thread = threading.Thread(target=examine_host, args=(agent, order), daemon=True)
    thread.start()
    (facts,) = itertools.islice(launcher.wait_for_messages(), 1)
    with ExitStack() as opened:
        for _ in range(3):
            for _ in range(200):
                place = "127.0.0.1", facts.get_number("port", 0, 65535)
                opened.enter_context(socket.create_connection(place, 2.0))
            launcher.send("reach", targets={})
            assert next(iter(launcher.wait_for_messages())).kind == "reached"
    ours.shutdown(socket.SHUT_RDWR)
    thread.join(10.0)
    assert not thread.is_alive()


def test_doctor_without_hosts_is_check_build(launcher):
    assert launcher.run("doctor").out == launcher.run("--check-build").out


@pytest.mark.parametrize("command", [["--check-build"], ["--help"], ["doctor"]])
def test_the_reader_of_a_text_may_leave(launcher, command):
    reading, writing = os.pipe()
    os.close(reading)
    process = launcher.start(*command, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.slow
def test_pages_of_counters_of_other_hosts_come_to_the_launcher(launcher):
    for rank in range(4):
        (launcher.home / f"page.{rank}").write_bytes(content(**training(rank)))
    program = "pathlib.Path(os.environ['ENGINE_COUNTERS']).write_bytes((here / f'page.{rank}').read_bytes())"
    job = on_hosts(launcher, "--summary", python=program)
    assert job.code == 0, job.err
    assert "enginerun: summary: 4 ranks" in job.err and "nothing was counted" not in job.err, job.err


@pytest.mark.slow
def test_the_summary_compares_ranks_with_the_processors_of_their_host(launcher):
    """Two hosts have one CPU each; one of them runs two ranks."""
    for rank in range(3):
        (launcher.home / f"page.{rank}").write_bytes(content(**training(rank)))
    program = "pathlib.Path(os.environ['ENGINE_COUNTERS']).write_bytes((here / f'page.{rank}').read_bytes())"
    one_cpu = f"taskset -c {min(os.sched_getaffinity(0))} env STAND_IN={{host}}"
    job = launcher.run("-H", "a:1,b:2", "--launch-agent", one_cpu, "--summary", python=program)
    assert job.code == 0, job.err
    assert "2 ranks share 1 processor on b, and so cannot all compute at once" in job.err, job.err
    assert len(job.err.split("ranks share")) == 2, job.err


def test_metrics_that_cannot_be_published_leave_nothing(launcher):
    job = on_hosts(launcher, "--metrics-file-sd", "/no/such/place/file.json", python="linger()")
    assert job.code == 2
    launcher.nothing_left()


def test_killing_the_launcher_during_the_start_leaves_no_process(launcher):
    stand_in_ssh(launcher)
    process = launcher.start("-H", "deaf:1,fine:1", python="linger()")
    until(lambda: (launcher.home / "ssh.log").exists() and len(marked(launcher.mark)) > 2, "agents")
    process.kill()
    process.communicate(timeout=DEADLINE)
    until(lambda: not marked(launcher.mark), "no process left", 10.0)


# ---- namespaces


@pytest.fixture(scope="module")
def three_hosts():
    """Three network namespaces; their addresses are the names of the hosts."""
    with need_namespaces(["10.79.0.1", "10.79.0.2", "10.79.0.3"]) as option:
        yield option


HOSTS = "10.79.0.1:2,10.79.0.2:1,10.79.0.3:2"


@pytest.mark.slow
def test_ranks_in_namespaces_reach_the_first_host(launcher, three_hosts):
    program = """
        import socket
        if rank == 0:
            with socket.socket(fileno=int(os.environ["ENGINE_HUB_FD"])) as listening:
                listening.settimeout(20)
                addresses = [listening.accept()[1][0].removeprefix("::ffff:") for _ in range(4)]
            print(sorted(addresses))
        else:
            address, _, port = os.environ["ENGINE_HUB"].rpartition(":")
            assert address == os.environ["MASTER_ADDR"] == "10.79.0.1"
            with socket.create_connection((address, int(port)), 20) as connection: connection.recv(1)
    """
    job = launcher.run("-H", HOSTS, three_hosts, python=program)
    assert job.code == 0, job.err
    assert job.lines(0) == ["['10.79.0.1', '10.79.0.2', '10.79.0.3', '10.79.0.3']"]


def test_the_engine_works_on_ranks_of_several_hosts_and_is_counted(launcher, three_hosts):
    program = """
        import numpy, engine
        engine.init()
        print(engine.local_rank(), engine.allreduce(numpy.ones(3), engine.Sum))
    """
    job = launcher.run("-H", HOSTS, three_hosts, "--summary", python=program)
    assert job.code == 0, job.err
    assert [job.lines(rank) for rank in range(5)] == [[f"{local} [5. 5. 5.]"] for local in (0, 1, 0, 0, 1)]
    assert "enginerun: summary: 5 ranks" in job.err and "nothing was counted" not in job.err, job.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("whom", ["launcher", "agent", "rank", "carrier", "interrupt"])
def test_in_namespaces_nothing_is_left_when_one_is_killed(launcher, three_hosts, whom):
    """Each host has a PID namespace whose first process is its agent, so that all processes end with it.

    The `carrier` is the process between launcher and agent, whose pipes bypass it here.
    """
    own_numbers = f"{three_hosts} unshare --pid --fork --mount-proc"
    process = launcher.start("-H", HOSTS, own_numbers, "--grace-period", 0.2, python=WAITS)
    launcher.wait_for(*UP, "up.4")
    (rank,) = [pid for pid in marked(launcher.mark) if _is_rank(pid, "3")]
    agent = _parent(rank)
    victim = {"launcher": process.pid, "agent": agent, "rank": rank, "carrier": _parent(agent)}.get(whom, process.pid)
    if whom != "interrupt":
        os.kill(victim, signal.SIGKILL)
    if whom == "interrupt":
        process.send_signal(signal.SIGINT)
    job = launcher.finish(process)
    until(lambda: not marked(launcher.mark), "no process left", 10.0)
    if whom == "interrupt":
        assert (job.code, job.err.count("SIGINT: passed on to the ranks")) == (130, 1)
    elif whom != "launcher":
        assert "first failure: rank 3 on 10.79.0.3: " in job.failure[0]
    assert ("10.79.0.3 was lost: its agent ended (" in job.err) == (whom == "agent")
    cut_off = (
        "10.79.0.3 was lost: its agent was cut off: the command that started it ended (killed by SIGKILL); ranks 3, 4"
    )
    assert (cut_off in job.err) == (whom == "carrier"), job.err


def _is_rank(pid: int, rank: str) -> bool:
    """Return whether a process is a rank itself, not one of its children."""
    program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return processes.variable_of(pid, "ENGINE_RANK") == rank and any(word.endswith(b"rank.py") for word in program)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.mark.slow
def test_doctor_tells_the_addresses_of_namespaces_and_what_is_cut_off(launcher, three_hosts):
    job = launcher.run("doctor", "-H", HOSTS, three_hosts, "--network-interface", "eth0")
    assert job.code == 0, job.out + job.err
    for address in ("10.79.0.1", "10.79.0.2", "10.79.0.3"):
        (row,) = [line.split() for line in job.out.splitlines() if line.startswith(address)]
        assert row.count(address) == 2 and "2 of 2" in " ".join(row)
