"""Print the knobs that a search has chosen, as JSON: `python -m autotune.decision LOG`. Needs only numpy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from autotune import horovod_csv, journal
from autotune.journal import JournalError
from autotune.log_summary import summarize_log
from autotune.space import Knobs
from autotune.terminal import print_text


def read_chosen_knobs(log: Path) -> tuple[Knobs, bool]:
    """Return the knobs of a log, and whether they are decided: before the first decision they are its default.

    In Horovod's CSV file, the sample with the highest score counts. Raises JournalError if the file is neither, and
    OSError if it cannot be read.
    """
    if horovod_csv.is_horovod_log(log):
        return horovod_csv.find_best_sample(horovod_csv.read(log)).knobs, True
    rows = journal.read(log)
    decisions = summarize_log(rows).decisions
    return (decisions[-1]["knobs"], True) if decisions else (rows[0]["default"], False)


if __name__ == "__main__":
    try:
        print_text(json.dumps(read_chosen_knobs(Path(sys.argv[1]))[0]))
    except (JournalError, OSError) as error:
        sys.exit(str(error))
