"""Stand-in for a launcher: holds pages of counters that advance, and obeys commands, one per line.

`python -m tests.metrics.fake_job RANKS [NAME]` starts a sleeping process for each rank, and prints their IDs.
Commands: `end`, `fail R` (all ranks say that R died), `write R FIELD VALUE`, `pause R` (its counters stand still),
`junk R`, `version R`, `clear R`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from engine.metrics import page

from .written_pages import content, fill

MS = 1_000_000


def main() -> None:
    """Obey commands until stdin ends."""
    size, name = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    pages = [page.make() for _ in range(size)]
    variables = {**os.environ, "ENGINE_JOB": f"{os.getpid()}-cafe", **({"ENGINE_RUN_NAME": name} if name else {})}
    ranks = [subprocess.Popen(["sleep", "300"], env=variables, stdin=subprocess.DEVNULL) for _ in range(size)]
    fields: list[dict[str, int]] = [
        {"state": 1, "pid": ranks[rank].pid, "rank": rank, "size": size, "local_rank": rank, "worlds": 1}
        | {"started_ns": time.time_ns(), "fusion_threshold": 64 << 20, "cycle_time_ns": 5 * MS, "chunk": 1 << 19}
        for rank in range(size)
    ]
    still: set[int] = set()
    print(*(rank.pid for rank in ranks), flush=True)
    while True:
        for rank, words in enumerate(fields):
            if rank in still:
                continue
            for field, step in (
                *(("steps", 1), ("step_ns", 50 * MS), ("blocked_ns", 10 * MS), ("exposed_ns", 4 * MS), ("lags", 2)),
                *(("lag_ns", rank * 2 * MS), ("collectives", 2), ("collective_bytes", 2_000_000), ("submitted", 8)),
                *(("completed", 8), ("collective_ns", 9 * MS), ("step_durations", 1)),
            ):
                words[field] = words.get(field, 0) + step
            fill(pages[rank], **words)
        if not select.select([0], [], [], 0.05)[0]:
            continue
        words_of = sys.stdin.readline().split() or ["end"]
        command, who = words_of[0], int(words_of[1]) if len(words_of) > 1 else -1
        if command == "write":
            fields[who][words_of[2]] = int(words_of[3])
            fill(pages[who], **fields[who])
        elif command == "pause":
            still.add(who)
        elif command in ("junk", "version", "clear"):
            still.add(who)
            data = {"junk": b"\xff" * page.BYTES, "version": content(version=7), "clear": bytes(page.BYTES)}[command]
            os.pwrite(pages[who], data, 0)
        else:
            for rank, words in enumerate(fields):
                failed = command == "fail"
                words |= {"state": 3, "cause": 1, "culprit": 1 + who} if failed else {"state": 2}
                if rank != who and rank not in still:
                    fill(pages[rank], **words)
            break
        print("done", flush=True)
    for process in ranks:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
