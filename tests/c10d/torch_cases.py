"""Tests of the suite in torch's wheel, on one backend: `python -m tests.c10d.torch_cases BACKEND DIRECTORY NAME ...`.

The suite asks in its decorators for the names of torch's own backends, so it is imported as if for gloo; its bodies
then see the backend that runs. Ranks are forked: each would need seconds to import the suite.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

SECONDS = 120  # for a case, after which its ranks show where they are and are ended
LONGEST = SECONDS + 60  # seconds after which a case is given up whose ranks cannot be ended

_scratch = tempfile.TemporaryDirectory(prefix="torch-cases-")
STORE = Path(_scratch.name, "store")
os.environ |= {
    "BACKEND": "gloo",
    "WORLD_SIZE": os.environ.get("WORLD_SIZE", "3"),
    "INIT_METHOD": f"file://{STORE}",
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS),
}

import enginerun_torch  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402


class SuiteTests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    """Every case of the suite, each on ranks of its own."""

    def setUp(self) -> None:
        super().setUp()
        STORE.unlink(missing_ok=True)
        self._start_processes(multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        ranks = list(self.processes)
        super().tearDown()
        for rank in ranks:
            rank.join(5)
            rank.kill()
            rank.join()


class _Outcome(unittest.TestResult):
    """Result of one case, as a word and a text."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.text = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.word, self.text = "skipped", reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.word, self.text = "failed", "".join(traceback.format_exception(*err))

    addFailure = addError


def list_cases() -> list[str]:
    return list(unittest.TestLoader().getTestCaseNames(SuiteTests))


def run_case(name: str) -> dict[str, str]:
    """Run a case; return its outcome with all that its ranks have written."""
    outcome = _Outcome()
    with tempfile.TemporaryFile() as output:
        kept = [os.dup(stream) for stream in (1, 2)]
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(LONGEST)
        try:
            SuiteTests(name).run(outcome)
        finally:
            signal.alarm(0)
            sys.stdout.flush()
            for stream, own in zip((1, 2), kept, strict=True):
                os.dup2(own, stream)
                os.close(own)
        output.seek(0)
        written = output.read().decode(errors="replace")
    return {"case": name, "outcome": outcome.word, "text": outcome.text, "output": written}


def _give_up(*_: object) -> None:
    raise TimeoutError(f"the case has not ended within {LONGEST} s")


def main(backend: str, directory: str, names: list[str]) -> None:
    enginerun_torch.register()
    suite.BACKEND = backend
    os.environ["BACKEND"] = "mpi"  # what cases of groups ask when they run: on others they want 8 ranks
    with open(Path(directory, f"{backend}.jsonl"), "w", encoding="utf-8") as results:
        for name in names:
            started = time.monotonic()
            result = run_case(name)
            results.write(json.dumps(result) + "\n")
            results.flush()
            print(f"{backend:>8} {time.monotonic() - started:5.1f} s  {result['outcome']:8} {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
