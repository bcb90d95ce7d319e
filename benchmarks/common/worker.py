"""Rank's side of `processes.Group`: answers requests, meets the other ranks, exits with the controller."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import select
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import binding, native, paths

SPINS = 4000
Handler = Callable[[dict[str, Any]], Any]


class WrongResultError(RuntimeError):
    """Error of a contender whose result is not that of the operation."""


@contextlib.contextmanager
def instrument_block(how: str) -> Iterator[None]:
    """Record a `timeline` of the block, or switch counting on (`counted`) or off (`paused`), or do nothing."""
    if how == "timeline":
        engine = importlib.import_module("engine")
        engine.start_timeline(paths.get_output_path("timeline"))
    elif how in ("counted", "paused"):
        importlib.import_module("engine.session.runtime").current_engine().count(how == "counted")
    try:
        yield
    finally:
        if how == "timeline":
            engine.stop_timeline()


class Meeting:
    """Barrier over a shared page, the same for all contenders, and outside of the timed calls."""

    def __init__(self, page: Path, rank: int, ranks: int, spins: int) -> None:
        library = ctypes.CDLL(str(native.compile_source("meet.c", shared=True)))
        self._meet = library.meet
        self._meet.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_int)
        self._meet.restype = None
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        self._anchor = ctypes.c_char.from_buffer(self._page)
        self._address = ctypes.addressof(self._anchor)
        self._rank, self._ranks, self._spins, self._count = rank, ranks, spins, 0

    def __call__(self) -> None:
        """Return when all ranks have called."""
        self._count += 1
        self._meet(self._address, self._rank, self._ranks, self._count, self._spins)


class GroupWorker:
    """Rank of a group; its rank and the world size are from the launcher's variables."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--socket", required=True)
        parser.add_argument("--page", type=Path, required=True)
        parser.add_argument("--processors", required=True)
        parser.add_argument("--crowd", type=int, help="ranks among which processors are divided, if not the world size")
        self.options = parser.parse_args()  # parsed options, with the module's own
        self.rank = _read_variable("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
        self.ranks = _read_variable("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        processors = [int(p) for p in self.options.processors.split(",")]
        # Bind before any import that starts threads, because they inherit it.
        crowd = self.options.crowd or self.ranks
        binding.bind_rank(self.rank, crowd, processors)
        crowded = crowd > len(processors)
        self.meet = Meeting(self.options.page, self.rank, self.ranks, 0 if crowded else SPINS)  # barrier of the group
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self.options.socket)
        threading.Thread(target=self._watch_controller, daemon=True, name="watch").start()

    def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Answer requests until one says to exit. A failure is reported, and ends the rank."""
        gc.collect()
        gc.disable()
        self._send_answer({"answer": self.rank})
        with self._socket.makefile("rb") as requests:
            for line in requests:
                request = json.loads(line)
                if request["do"] == "exit":
                    return
                try:
                    answer = handlers[request["do"]](request)
                except BaseException:
                    self._send_answer({"error": traceback.format_exc()})
                    raise
                self._send_answer({"answer": answer})
                gc.collect()

    def report_failure(self) -> None:
        """Report the exception being handled, if it occurs before `serve`."""
        self._send_answer({"error": traceback.format_exc()})

    def _send_answer(self, content: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(content).encode() + b"\n")

    def _watch_controller(self) -> None:
        """Wait until the controller is gone, then end the process, even if it is blocked."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        poll.poll()
        time.sleep(1.0)  # lets a rank that was just told to exit finish in order
        shutil.rmtree(Path(self.options.socket).parent, ignore_errors=True)  # needed if the controller was killed
        os._exit(1)


def _read_variable(*names: str) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit(f"{names[0]} is not set: this module is started by `python -m benchmarks`")
