"""Persistent ranks: started once, they get one program after the other over a socket."""

from __future__ import annotations

import pickle
import shutil
import socket
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ..ranks import Job, RanksFailed, start_ranks
from ..waiting import SLOWNESS
from . import drawn_operations

ENV = {"ENGINE_STALL_LIMIT": f"{30 * SLOWNESS:g}"}


def serve(address: str) -> None:
    """Run programs on a rank until the socket closes. An exception is sent back as its text, and ends the rank."""
    import engine

    engine.init()
    drawn_operations.form_sets(engine.size())
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        file = link.makefile("rwb")
        pickle.dump(engine.rank(), file)
        file.flush()
        answer: Any = None
        while not isinstance(answer, str):
            try:
                program = pickle.load(file)
            except EOFError:
                break
            try:
                answer = drawn_operations.Walk(engine.rank(), engine.size()).run(program)
            except Exception:
                answer = traceback.format_exc()
            pickle.dump(answer, file)
            file.flush()
    engine.shutdown()


class Pool:
    """Pool of `size` ranks. After a program that a rank did not survive, the next one gets new ranks."""

    def __init__(self, size: int, answer_within: float = 60.0) -> None:
        self.size = size
        self.answer_within = answer_within * SLOWNESS
        self.programs = 0  # number since these ranks were started
        self._job: Job | None = None
        self._files: list[Any] = []

    def _start(self) -> None:
        home = Path(tempfile.mkdtemp(prefix="pool-"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(home / "socket"))
                listener.listen(self.size)
                listener.settimeout(self.answer_within)
                self._job = start_ranks(self.size, serve, str(home / "socket"), env=ENV)
                by_rank = {}
                for _ in range(self.size):
                    link, _ = listener.accept()
                    link.settimeout(self.answer_within)
                    with link:  # the file object keeps the connection open
                        file = link.makefile("rwb")
                    by_rank[pickle.load(file)] = file
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(home)
        self._files = [by_rank[rank] for rank in range(self.size)]
        self.programs = 0

    def run(self, program: drawn_operations.Program) -> list[drawn_operations.Outcome]:
        """Run a program; return each rank's report, or raise `RanksFailed` if one raised, died or did not answer."""
        if self._job is None:
            self._start()
        assert self._job is not None
        self.programs += 1
        answers: list[Any] = []
        try:
            for file in self._files:
                pickle.dump(program, file)
                file.flush()
            answers.extend(pickle.load(file) for file in self._files)
        except (OSError, EOFError) as error:
            self._job.dump()
            text = f"{error!r} from rank {len(answers)} in program {self.programs}\n{self._job.result()}"
            self.close()
            raise RanksFailed(text) from error
        raised = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if raised:
            self.close()
            raise RanksFailed("\n".join(raised))
        return answers

    def close(self) -> None:
        """End the ranks; kill those that do not exit."""
        files, job = self._files, self._job
        self._files, self._job = [], None
        for file in files:
            file.close()
        if job is not None:
            with job:
                job.allow(20.0)
                job.finish(check=False)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
