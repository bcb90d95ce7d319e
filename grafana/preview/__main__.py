"""Command `python -m grafana.preview URL RUN`: record what a Prometheus answers to every panel of the dashboards."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from grafana.preview.recording import GPU, Source, find_unanswered, record_dashboards

POINTS = 120  # points of a line


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m grafana.preview", description=__doc__)
    parser.add_argument("url", help="of a Prometheus, such as http://127.0.0.1:9090")
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--end", type=float, default=time.time(), help="unix time at which the recording ends (now)")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--about", default="a job", help="what kind of run it is, on which machine")
    parser.add_argument("--gpu", action="store_true", help="require answers to the panels of GPUs, too")
    parser.add_argument("--out", type=Path, default=Path("dashboards.json"))
    given = parser.parse_args()
    start = given.end - 60 * given.minutes
    source = Source(given.url, given.run, start, given.end, step=max(5.0, 60 * given.minutes / POINTS))
    boards = record_dashboards(source)
    content = {"about": [given.about], "seconds": given.end - start, "step": source.step, "boards": boards}
    given.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(given.out)
    unanswered = list(find_unanswered(boards, () if given.gpu else (GPU,)))
    print("\n".join(unanswered) or "every panel has data", file=sys.stderr if unanswered else sys.stdout)
    return bool(unanswered)


if __name__ == "__main__":
    sys.exit(main())
