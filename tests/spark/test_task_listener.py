"""The driver's listener for tasks, without Spark: what it tells of a task that does not speak as one does."""

from __future__ import annotations

import io
import threading

import pytest

from engine.spark.task_channel import reach_driver
from engine.spark.task_listener import TaskListener

from ..waiting import until

SECRET = "5ec2e7" * 8


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("sing", {}, "a task sends 'sing', which this driver does not know"),
        ("say", {"line": 1}, "a message 'say' has line = 1 instead of a text"),
        ("end", {"rank": []}, "Error"),
    ],
)
def test_listener_says_why_it_gives_a_task_up(kind, fields, why):
    out = io.StringIO()
    with TaskListener(1, SECRET, "127.0.0.1", (out, out)) as listener:
        channel = reach_driver([("127.0.0.1", listener.port)], SECRET, 0)
        assert channel is not None
        channel.send("hello", rank=0, host="there")
        channel.send(kind, **fields)
        record = until(lambda: listener.lost.get(0), "the task is given up")
        channel.close()
    assert "does not speak as one does" in record.end.lost and why in record.end.lost
    assert f"enginerun: rank 0: {record.end.lost}" in out.getvalue()


def test_listener_takes_a_connection_that_ends_for_a_lost_executor():
    out = io.StringIO()
    with TaskListener(1, SECRET, "127.0.0.1", (out, out)) as listener:
        channel = reach_driver([("127.0.0.1", listener.port)], SECRET, 0)
        assert channel is not None
        channel.send("hello", rank=0, host="there")
        channel.out.drain()
        channel.close()
        record = until(lambda: listener.lost.get(0), "the task is lost")
    assert record.end.lost == "its task was killed, or its executor was lost"
    assert out.getvalue() == ""


def test_listener_calls_back_at_a_deadline_that_not_all_tasks_have_met():
    out, late = io.StringIO(), threading.Event()
    with TaskListener(2, SECRET, "127.0.0.1", (out, out)) as listener:
        channel = reach_driver([("127.0.0.1", listener.port)], SECRET, 0)
        assert channel is not None
        listener.set_deadline(0.2, late.set)
        assert late.wait(20) and listener.came == 1
        channel.close()


def test_listener_does_not_call_back_at_a_deadline_that_all_tasks_have_met():
    out, late = io.StringIO(), threading.Event()
    with TaskListener(1, SECRET, "127.0.0.1", (out, out)) as listener:
        listener.set_deadline(0.5, late.set)
        channel = reach_driver([("127.0.0.1", listener.port)], SECRET, 0)
        assert channel is not None and not late.wait(1.0)
        channel.close()
