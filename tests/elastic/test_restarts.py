"""Workers that are started while threads of the launcher serve metrics: only agents, with one thread, start them."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time

import pytest

from ..launch.conftest import launcher as launcher
from ..launch.test_launch_metrics import scrape
from ..waiting import let_pass, until
from .elastic_jobs import job as job

PAUSE = 0.01  # seconds between scrapes
SIZE = 5
BODY = """
def body(t):
    t.step()
    if t.world > {worlds}: return
    t.meet("dying")
    if t.rank: os.kill(os.getpid(), signal.SIGKILL)
    t.until(lambda: False)
"""
THREADED = """
import sys, threading, time
if sys.orig_argv[-1] == "engine.launch.agent":
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


class Scraper(threading.Thread):
    """Scrapes metrics until there is no answer; `count` is the number of answers, `last` the time of the last."""

    def __init__(self, where: str) -> None:
        super().__init__(daemon=True)
        self.where, self.count, self.last = where, 0, 0.0

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while scrape(self.where):
                self.count, self.last = self.count + 1, time.monotonic()
                let_pass(PAUSE)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [8, pytest.param(500, marks=pytest.mark.slow)])
def test_workers_are_started_while_metrics_are_scraped(job, restarts):
    """All workers but one are killed at a time, and no process with threads starts a worker."""
    worlds = restarts // (SIZE - 1)
    process = job.start("-np", SIZE, "--min-np", SIZE, "--metrics-port", 0, body=BODY.format(worlds=worlds))
    where = until(lambda: re.search(r"http://(\S+)/metrics", job.said()), "metrics are served")
    scraper = Scraper(where[1])
    scraper.start()
    until(lambda: process.poll() is not None, f"the end of {worlds + 1} worlds", 60 + 10 * worlds, 0.1)
    ended = time.monotonic()
    done = job.wait(process)
    scraper.join(60)
    assert done.code == 0, done.err
    started = len(list(job.home.glob("pid.*")))
    assert started == SIZE + worlds * (SIZE - 1), done.err
    assert scraper.count > worlds and scraper.last > ended - 5, "the endpoint has not answered all the time"
    assert f"the job had {worlds} resets" in done.err


@pytest.mark.slow
def test_an_agent_with_a_thread_starts_nobody(job):
    """The locks that a child inherits from a process with threads depend on the moment."""
    (job.home / "sitecustomize.py").write_text(THREADED)
    path = os.pathsep.join([str(job.home), job.launcher.environment["PYTHONPATH"]])
    hosts = ("-H", "a:1", "--launch-agent", f"env PYTHONPATH={path} STAND_IN={{host}}")
    done = job.run("-np", 1, "--min-np", 1, *hosts)
    assert done.code != 0
    assert "workers are started by a process with one thread, and this one has 2" in done.err
