"""Messages of torch.distributed on the engine: on one host, and on two that are pretended."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import Ended, run_job
from .message_programs import every_name

pytest.importorskip("torch")
MODULE = "tests.c10d.message_programs"
TEXTS = [
    "messages_of_another_size",
    "receives_without_a_message",
    "sends_without_a_receiver",
    "group_destroyed_under_a_receive",
    "sent_messages_are_let_go",
    "threads_that_time_out_together",
    "wait_interrupted_by_a_signal",
    "receiver_stops_in_its_message",
]


@pytest.fixture(scope="module", params=[(2, 1), (3, 1), (3, 2)], ids=["2ranks", "3ranks", "2hosts"])
def ended_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    size, hosts = request.param
    directory = tmp_path_factory.mktemp(f"messages{size}on{hosts}")
    return run_job(directory, MODULE, [*every_name(), *TEXTS], size, pretended=hosts)


@pytest.mark.parametrize("name", every_name())
def test_program(ended_job: Ended, name: str) -> None:
    assert ended_job.returned[name] == [None] * len(ended_job.codes), "\n".join(ended_job.outputs)[-3000:]


def test_ranks_end_cleanly(ended_job: Ended) -> None:
    assert ended_job.codes == [0] * len(ended_job.codes), "\n".join(ended_job.outputs)


def test_a_message_of_another_size_is_refused(ended_job: Ended) -> None:
    small, large = ended_job.returned["messages_of_another_size"][1]
    assert "12 bytes was received for a tensor of 16" in small
    assert "1200000 bytes was received for a tensor of 1200004" in large


def test_a_receive_ends_with_the_groups_time_out(ended_job: Ended) -> None:
    one, any_sender, this_wait = ended_job.returned["receives_without_a_message"][1]
    assert "waited 1.5 s for a message of rank 0 with tag 4: the time-out of its process group" in one
    assert "waited 1.5 s for a message of any rank with tag 4" in any_sender
    assert "waited 0.2 s for a message of rank 0 with tag 5: the time-out of this wait" in this_wait


def test_a_large_send_ends_with_the_groups_time_out(ended_job: Ended) -> None:
    (text,) = ended_job.returned["sends_without_a_receiver"][0]
    assert "waited 1.5 s for a message of 1200000 bytes to rank 1 with tag 6 to be received" in text


def test_a_rank_that_leaves_fails_messages_with_it_alone(ended_job: Ended) -> None:
    one, any_sender, send = ended_job.returned["group_destroyed_under_a_receive"][0]
    assert "a message of rank 1 with tag 3 failed" in one
    for text in (one, any_sender, send):
        assert "rank 1 has left" in text


def test_messages_that_were_received_are_let_go(ended_job: Ended) -> None:
    kept, watched = ended_job.returned["sent_messages_are_let_go"][0]
    assert (watched, kept <= 1 << 20) == (0, True), "\n".join(ended_job.outputs)[-3000:]


def test_a_receive_is_taken_back_once_by_threads_that_time_out_together(ended_job: Ended) -> None:
    texts = ended_job.returned["threads_that_time_out_together"][1]
    assert len(texts) == 4, "\n".join(ended_job.outputs)[-3000:]
    assert all("waited 1.5 s for a message of rank 0 with tag 4: the time-out of its process group" in t for t in texts)


def test_a_signal_handler_may_raise_in_a_wait(ended_job: Ended) -> None:
    assert ended_job.returned["wait_interrupted_by_a_signal"][1] == 3, "\n".join(ended_job.outputs)[-3000:]


def test_a_receiver_that_is_stopped_is_named(ended_job: Ended) -> None:
    """A part of the message has been received: that is given five seconds more."""
    text, seconds = ended_job.returned["receiver_stops_in_its_message"][0]
    assert "waited 6.5 s for the rest of a message of 400000000 bytes to rank 1 with tag 7" in text
    assert seconds < 30


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_interpreter_ends_cleanly_while_a_callback_runs(tmp_path: Path, hosts: int) -> None:
    ended = run_job(tmp_path, MODULE, ["exits_in_a_callback"], 2, pretended=hosts)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)[-3000:]


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", ["peer_dies_before_its_message", "peer_dies_in_its_message", "peer_dies_unmet"])
def test_a_sender_that_dies_is_named(tmp_path: Path, name: str, hosts: int) -> None:
    ended = run_job(tmp_path, MODULE, [name], 2, pretended=hosts)
    text, seconds = ended.returned[name][0]
    assert "rank 1 died" in text, "\n".join(ended.outputs)[-3000:]
    assert "a message of rank 1 with tag 0 failed" in text
    assert seconds < 30


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_receiver_that_dies_is_named(tmp_path: Path, hosts: int) -> None:
    name = "receiver_dies_in_its_message"
    ended = run_job(tmp_path, MODULE, [name], 2, pretended=hosts)
    text, seconds = ended.returned[name][0]
    assert "rank 1 died" in text, "\n".join(ended.outputs)[-3000:]
    assert "a message of 400000000 bytes to rank 1 with tag 7 to be received failed" in text
    assert seconds < 30
