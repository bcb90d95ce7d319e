"""Stand-in for ssh in `tests/elastic/chaos.py`: `chaos_entering.py DIRECTORY ENTRIES HOST COMMAND` enters a host.

ENTRIES are `ADDRESS=PID` of all hosts, separated by commas, with the first process of each. Like ssh, this process
stays and copies data both ways: killed, it cuts the agent off; stopped, it is like a pulled cable. As long as the
directory has a file `dark.NUMBER` of the host, no new connection is made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from ..waiting import until


def carry(reading: int, writing: int) -> None:
    """Copy bytes until the end of the input."""
    try:
        while data := os.read(reading, 1 << 16):
            while data:
                data = data[os.write(writing, data) :]
    except BrokenPipeError:
        pass
    os.close(writing)


def main() -> None:
    directory, entries, host, *command = sys.argv[1:]
    pids = dict(entry.split("=") for entry in entries.split(","))
    number = str(list(pids).index(host))
    dark = Path(directory, f"dark.{number}")
    until(lambda: not dark.exists(), f"a way to host {number}", 120.0)
    enter = ["nsenter", "-t", pids[host], "--net", "--uts", "--"]
    agent = subprocess.Popen(
        [*enter, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"CHAOS_AGENT": number},
    )
    assert agent.stdin is not None and agent.stdout is not None
    threading.Thread(target=carry, args=(0, os.dup(agent.stdin.fileno())), daemon=True).start()
    agent.stdin.close()
    carry(agent.stdout.fileno(), 1)
    sys.exit(agent.wait())


if __name__ == "__main__":
    main()
