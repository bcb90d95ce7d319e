"""Programs on ranks that tests start themselves, with the stand-ins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.host.machine import free_port

from ..standins import ROOT, start

SECONDS = 60


def chosen(libraries: Path) -> dict[str, str]:
    """Return the settings by which the engine uses the stand-ins, whatever else is installed."""
    return {
        "ENGINE_CUDA_LIBRARY": str(libraries / "libcuda.so.1"),
        "ENGINE_NCCL_LIBRARY": str(libraries / "libnccl.so.2"),
    }


def find_hub() -> dict[str, str]:
    """Return the variables of ranks that pretend to be on several hosts, which meet at a free port."""
    return {"ENGINE_HUB": f"127.0.0.1:{free_port()}", "ENGINE_SECRET": "a secret of tests"}


class Job:
    """Ranks of a program of nccl_programs.py, or of another module, each with its own device.

    Settings are those of the stand-ins; `more` has further variables.
    """

    def __init__(
        self,
        libraries: Path | Sequence[Path],
        where: Path,
        size: int,
        *program: str,
        devices: Sequence[int | str] | None = None,
        module: str = "nccl_programs",
        more: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        command = [sys.executable, "-P", "-m", f"tests.gpu.{module}"]
        each = [libraries] * size if isinstance(libraries, Path) else list(libraries)
        settings = {"devices": 8, "quiet": 1, **settings}
        self.ranks = [
            start(
                [*command, program[0], str(rank), str(size), *program[1:]],
                each[rank],
                {
                    "PYTHONPATH": str(ROOT),
                    "PYTHONUNBUFFERED": "1",  # programs end at once, even if a thread hangs
                    "CUDA_VISIBLE_DEVICES": str(devices[rank] if devices else rank),
                    **chosen(each[rank]),
                    **(more or {}),
                },
                cwd=where,
                **settings,
            )
            for rank in range(size)
        ]

    def end(self, seconds: float = SECONDS) -> tuple[list[int], list[str]]:
        """Wait for all ranks; return their statuses, and what they wrote."""
        try:
            texts = ["".join(rank.communicate(timeout=seconds)) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
        return [rank.returncode for rank in self.ranks], texts

    def succeeds(self, seconds: float = SECONDS) -> list[str]:
        """Wait for all ranks, and expect that none finds an error."""
        statuses, texts = self.end(seconds)
        assert statuses == [0] * len(statuses), f"{statuses}\n" + "\n".join(texts)
        return texts

    def goes_wrong(self, seconds: float, may_hang: bool = True) -> None:
        """Wait for all ranks, and expect that one finds an error, or, if that is allowed, that they do not end."""
        try:
            statuses, texts = self.end(seconds)
        except subprocess.TimeoutExpired:
            if may_hang:
                return
            raise
        assert any(statuses), texts


Start = Callable[..., Job]
"""Function that starts a program on ranks, as the fixture `start_ranks` gives it."""
