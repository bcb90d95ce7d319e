"""Jobs of ranks with a process group that call functions of a module, on one backend or another."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.host.machine import free_port

if TYPE_CHECKING:
    from ..netns import Hosts

ROOT = Path(__file__).parents[2]
SECONDS = 240.0
HOSTS = "C10D_TEST_HOSTS"


@dataclass(frozen=True)
class Ended:
    """Result of a job: exit codes and outputs of the ranks, and what the functions returned, by name and rank."""

    codes: list[int]
    outputs: list[str]
    returned: dict[str, list[Any]]


def run_job(
    directory: Path,
    module: str,
    names: list[str],
    size: int,
    backend: str = "engine",
    env: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
    pretended: int = 1,
) -> Ended:
    """Call functions of a module on ranks that the variables of torchrun describe, one function after another.

    Of a package the names have their modules before them. What a function raises is its result on that rank. With
    `hosts` equal numbers of ranks run on each of them; several `pretended` hosts have the ranks in turn.
    """
    port = free_port()
    each = size // hosts.count if hosts else size
    address = hosts.address(0) if hosts else "127.0.0.1"
    processes = []
    for rank in range(size):
        host, local = divmod(rank, each)
        place = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": each, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": address}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "OMPI_", "PMI"))}
        output = open(directory / f"output.{rank}", "w")  # noqa: SIM115
        processes.append(
            (functools.partial(hosts.start, host) if hosts else subprocess.Popen)(
                [sys.executable, "-m", "tests.c10d.jobs", str(directory), module, backend, *names],
                env=kept | {"OMP_NUM_THREADS": "1", HOSTS: str(pretended)} | variables | dict(env or {}),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        )
        output.close()
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = [(directory / f"output.{rank}").read_text() for rank in range(size)]
    returned: dict[str, list[Any]] = {}
    for name in names:
        paths = [directory / f"{name}.{rank}" for rank in range(size)]
        returned[name] = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
    return Ended(codes, outputs, returned)


def main(directory: str, module: str, backend: str, names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from engine.c10d import meeting

    pretended = int(os.environ[HOSTS])
    if pretended > 1:
        meeting._describe_host = lambda: f"host {int(os.environ['RANK']) % pretended}"
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in names:
        torch.manual_seed(0)
        try:
            place, _, function = f"{module}.{name}".rpartition(".")
            result = getattr(import_module(place), function)(rank, size)
        except Exception as error:
            result = error
        try:
            told = pickle.dumps(result)
        except Exception:
            told = pickle.dumps(RuntimeError(repr(result)))
        Path(directory, f"{name}.{rank}").write_bytes(told)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
