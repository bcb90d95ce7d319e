"""Stands for ssh in `tests/elastic/chaos.py`: `chaos_entering.py ENTRIES HOST COMMAND` enters a host's namespaces.

ENTRIES are `ADDRESS=PID` of all hosts, separated by commas: the first process of each.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    entries, host, *command = sys.argv[1:]
    pids = dict(entry.split("=") for entry in entries.split(","))
    os.environ["CHAOS_AGENT"] = str(list(pids).index(host))
    enter = ["nsenter", "-t", pids[host], "--net", "--uts", "--"]
    os.execvp(enter[0], [*enter, *command])


if __name__ == "__main__":
    main()
