"""Assignment of ranks to hosts, and the start of their agents."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from engine.launch.cli import doctor
from engine.launch.cli.options import parse
from engine.launch.errors import LaunchError
from engine.launch.hosts.channel import GREETING, ChannelError, Decoder, Message, pack_message
from engine.launch.hosts.host_list import HostRanks, lay_out, parse_hosts, read_hostfile, without_ranks
from engine.launch.hosts.reach import Reach
from engine.launch.hosts.remote import agent_command
from engine.launch.process.cpu_binding import Allotment
from engine.launch.process.plan import Crew, Job, plan
from engine.net.rendezvous.layout import Layout

from .host_jobs import on_hosts

pytestmark = pytest.mark.quick

AGENT = [sys.executable, "-P", "-m", "engine.launch.agent"]


def test_hosts_are_read_with_their_slots():
    assert parse_hosts("a:2, b") == [("a", 2), ("b", 1)]
    assert parse_hosts("me@a:2,10.0.0.1:3,[fe80::1]:4,[::1]") == [
        ("me@a", 2),
        ("10.0.0.1", 3),
        ("fe80::1", 4),
        ("::1", 1),
    ]
    assert parse_hosts("a:2,b:1,a:1") == [("a", 3), ("b", 1)]


@pytest.mark.parametrize("text", ["", "a:", ":2", "a:0", "a:-1", "a:x", "a,,b", "-oProxyCommand=x:2", "a b:2", "a:1:2"])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(LaunchError, match="--hosts: "):
        parse_hosts(text)


def test_files_of_hosts_in_the_forms_of_horovod_and_open_mpi():
    assert read_hostfile("# all\na slots=2 # here\n\nb\na\n") == [("a", 3), ("b", 1)]
    assert read_hostfile("a slots = 4 max_slots=8\nb:3\nfe80::1 slots=2") == [("a", 4), ("b", 3), ("fe80::1", 2)]
    with pytest.raises(LaunchError, match="line 2 is 'b cores=3'"):
        read_hostfile("a\nb cores=3")


@pytest.mark.parametrize(
    "line", ["b slots=0", "b:0", "b slots=x", "b slots=", "b:2 slots=2", "b,c slots=2", "-o slots=1"]
)
def test_a_line_of_a_file_that_is_no_host_is_told_with_its_number(line):
    with pytest.raises(LaunchError, match=f"--hostfile: line 3 is '{line}', and 'name slots=N' with at least one slot"):
        read_hostfile(f"a\n\n{line} # here\n")


@pytest.mark.parametrize("run", [lambda line: parse([*line, "true"]), doctor.main])
def test_hosts_are_given_once(run, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    with pytest.raises(LaunchError, match=r"-H b:1 and --hostfile .*hosts both name the hosts: give one of the two"):
        run(["-H", "b:1", "--hostfile", str(tmp_path / "hosts")])


def test_a_file_without_hosts_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(LaunchError, match="names no host"):
        parse(["--hostfile", str(tmp_path / "hosts"), "true"])


def test_ranks_are_given_to_hosts_in_order():
    hosts = [("a", 2), ("b", 4), ("c", 1)]
    assert lay_out(hosts, 4, set()) == [HostRanks("a", (0, 1), False), HostRanks("b", (2, 3), False)]
    assert [place.ranks for place in lay_out(hosts, 7, set())] == [(0, 1), (2, 3, 4, 5), (6,)]


def test_hosts_that_get_no_rank_are_known_by_one_of_their_names():
    hosts = [("a", 2), ("localhost", 1), ("b", 10**9), ("me", 1), ("c", 1)]
    assert without_ranks(hosts, 2, {"me"}) == ("localhost", "b", "c")
    assert without_ranks(hosts, 3, {"me"}) == ("b", "c")
    assert without_ranks(hosts, 4, {"me"}) == ("c",)
    assert parse(["-H", "localhost:2,a:1", "-np", "2", "true"]).idle == ("a",)
    assert parse(["-H", "localhost:2,a:1", "true"]).idle == parse(["-np", "2", "true"]).idle == ()


def test_a_host_without_ranks_is_told(launcher):
    line = "enginerun: no rank runs on b, c: the other hosts have slots for all 2 ranks"
    told = [on_hosts(launcher, "-np", 2, *quiet, python="pass", hosts="a:2,b:1,c:1") for quiet in ((), ("--quiet",))]
    assert [job.code for job in told] == [0, 0]
    assert [line in job.err.splitlines() for job in told] == [True, False]


def test_all_names_of_this_machine_are_one_host():
    hosts = [("localhost", 1), ("a", 2), ("127.0.0.1", 1), ("me", 1)]
    assert lay_out(hosts, 5, {"me"}) == [HostRanks("localhost", (0, 3, 4), True), HostRanks("a", (1, 2), False)]


def test_hosts_that_are_all_here_need_no_agent():
    assert parse(["-H", f"localhost:2,{socket.gethostname()}:1", "true"]).places == ()
    assert [place.local for place in parse(["-H", "localhost:2,a:1", "true"]).places] == [True, False]
    assert [place.local for place in parse(["-H", "localhost:2", "--launch-agent", "env", "true"]).places] == [False]
    assert parse(["-H", "localhost:2,a:1", "-np", "2", "true"]).places == ()


def test_options_for_other_hosts_do_nothing_without_any():
    line = ["-p", "22", "--network-interface", "eth0"]
    assert parse(["-np", "2", *line, "true"]).ignored == ("-p", "--network-interface")
    assert parse(["-H", "a:2", *line, "true"]).ignored == ()
    with pytest.raises(LaunchError, match="none are given: add -H"):
        parse(["-np", "2", "--launch-agent", "env", "true"])
    with pytest.raises(LaunchError, match="--ssh-options: '\"' cannot be divided"):
        parse(["-H", "a:2", "--ssh-options", '"', "true"])


def test_the_command_that_starts_an_agent():
    far, here = HostRanks("me@a", (0,), False), HostRanks("localhost", (1,), True)
    assert agent_command(here, Reach(python=("python3",)), 60) == AGENT
    ssh = agent_command(far, parse(["-H", "a", "-p", "2222", "-i", "key", "--ssh-options=-o User=x", "true"]).reach, 60)
    assert ssh[:7] == ["ssh", "-o", "User=x", "-p", "2222", "-i", "key"]
    assert {"BatchMode=yes", "StrictHostKeyChecking=accept-new", "ConnectTimeout=55"} <= set(ssh)
    assert "ConnectTimeout=1" in agent_command(far, Reach(), 2.5)
    assert ssh[-2] == "me@a" and shlex.split(ssh[-1]) == AGENT
    reach = parse(["-H", "a", "--launch-agent", "ip netns exec ns-{host}", "true"]).reach
    assert agent_command(HostRanks("a", (0,), False), reach, 60) == ["ip", "netns", "exec", "ns-a", *AGENT]
    assert agent_command(far, Reach(launch_agent=("sh", "-c", "x")), 60) == ["sh", "-c", "x", *AGENT]
    assert agent_command(far, Reach(python=("/opt/python",)), 60)[-1] == "/opt/python -P -m engine.launch.agent"


def test_each_rank_knows_its_place_on_its_host_and_among_hosts():
    job = Job(
        5,
        "job",
        "5e" * 32,
        1234,
        Path("/j"),
        {},
        horovod=True,
        torchrun=True,
        address="a",
        hub="a:99",
        interface="eth0",
    )
    first, second = plan(job, Allotment(None, ((0,), (1,)), ""), {"ENGINE_HUB_FD": "3"}, Crew(1, (3, 2), (1, 4)))
    assert (first.rank, second.rank, second.cpus) == (1, 4, (1,))
    expected = {
        "ENGINE_RANK": "4",
        "ENGINE_SIZE": "5",
        "ENGINE_LOCAL_RANK": "1",
        "ENGINE_LOCAL_SIZE": "2",
        "ENGINE_CROSS_RANK": "1",
        "ENGINE_CROSS_SIZE": "2",
        "ENGINE_HUB": "a:99",
        "ENGINE_INTERFACE": "eth0",
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1234",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }
    assert {name: second.environment.get(name) for name in expected} == expected
    assert "ENGINE_HUB_FD" not in second.environment


def test_horovods_cross_rank_is_that_of_the_function():
    """The engine's variable numbers the host; Horovod's is the index among hosts that have such a local rank."""
    layout = Layout.from_crews([[0], [1, 2, 3], [4, 5]])
    job = Job(6, "job", "5e" * 32, 1234, Path("/j"), {}, horovod=True)
    for host, crew in enumerate(layout.crews):
        for each in plan(job, Allotment(1, None, ""), {}, Crew(host, tuple(map(len, layout.crews)), tuple(crew))):
            told = [int(each.environment[f"HOROVOD_CROSS_{name}"]) for name in ("RANK", "SIZE")]
            assert tuple(told) == layout.cross_rank(each.rank)
            assert [each.environment[f"ENGINE_CROSS_{name}"] for name in ("RANK", "SIZE")] == [str(host), "3"]


def test_messages_pass_in_any_pieces_behind_what_a_shell_writes():
    sent = b"Welcome!\n" + GREETING + pack_message("output", b"\0\xff", rank=3) + pack_message("done")
    decoder = Decoder(greeted=False)
    found = [message for place in range(len(sent)) for message in decoder.feed(sent[place : place + 1])]
    assert found == [Message("output", {"rank": 3}, b"\0\xff"), Message("done", {})]
    assert decoder.noise == b"Welcome!\n"


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\0\0\0\1\0\0\0\2ab", b"\0\0\0\2\0\0\0\2[]", b"\0\0\0\2\0\0\0\2{{"])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ChannelError):
        list(Decoder().feed(data))
