"""Screen of `enginerun top`: a head, a row for each rank, warnings, the tuner. Drawn with rich."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...text import readable
from ..elastic_job import ElasticJob
from ..page import PageError, Snapshot
from . import words
from .late_steps import LateRank, collect_late_steps, describe_late_steps
from .rates import JobReading, Page, Rates, find_straggler, names_of_hosts, pending, slow_host, slow_link, waits_by_host

NOTES = 6  # maximum number of warning lines
GROUP_LINES = 5  # maximum number of lines about process sets
OLD_SECONDS = 5.0  # age from which figures of another host are reported as old
LEAST_ROWS = 2  # rows of ranks for which a low terminal omits other lines
BAD = ("failed", "gone", "unreadable", "stopped")
STYLES = {**dict.fromkeys(BAD, "bold red"), **dict.fromkeys(("ended", "starting", "resetting"), "dim")}
NONE = "-"
HOST_WIDTH = 12  # characters of a host's name


@dataclass(frozen=True)
class Frame:
    """Figures to show in one frame."""

    run: str
    reading: JobReading
    rates: Mapping[int, Rates]  # since the previous reading
    letters: Mapping[int, str]  # states of the ranks' processes (`find_jobs.Attached.read_process_states`)
    now: float  # unix time
    elastic: ElasticJob | None = None  # state of an elastic job, where ranks are slot numbers; None for other jobs

    def state(self, rank: int) -> str:
        """Return `starting`, `running`, `stopped`, `gone` (silent), `ended`, `failed`, `resetting` or `unreadable`."""
        page = self.reading.pages[rank]
        if page is None:
            return "starting"
        if isinstance(page, PageError):
            return "unreadable"
        letter = self.letters.get(rank, "")
        if page.state in ("running", "new", "resetting"):
            if letter in ("X", "Z"):
                return "gone"
            if letter in ("T", "t"):
                return "stopped"
        return "starting" if page.state == "new" else page.state

    @property
    def straggler(self) -> int | None:
        """Rank for which the others wait; None if no rank stands out."""
        lags = {rank: each.lag for rank, each in self.rates.items() if each.lag is not None}
        return find_straggler(lags, self.compute_median(each.step for each in self.rates.values()))

    @cached_property
    def late(self) -> dict[int, LateRank]:
        """Late steps since the start, by rank."""
        return collect_late_steps(self.reading.pages)

    @property
    def hosts(self) -> dict[int, str]:
        """Names of the job's hosts by number; empty if there is one."""
        return names_of_hosts(self.reading.pages)

    @property
    def crossing(self) -> dict[int, float]:
        """Share of the time in which the others waited for a host's data, by host, as in `rates.waits_by_host`."""
        pages = self.reading.snapshots
        return waits_by_host((pages[rank], each.crossing) for rank, each in self.rates.items())

    @staticmethod
    def compute_median(numbers: Iterable[float | None]) -> float | None:
        """Return the median of the known numbers; None if there are none."""
        known = [number for number in numbers if number is not None]
        return statistics.median(known) if known else None


def draw_frame(frame: Frame, width: int, height: int | None) -> RenderableType:
    """Draw a frame in lines of at most `width` columns.

    There are fewer than `height` lines, as one stays free; None: no limit.
    """
    head = [Text(line) for line in _pack_lines(_describe_job(frame), width)]
    if head:
        head[0].stylize("bold")
    tuner = [Text(line) for line in _pack_lines(_describe_tuner(frame), width)]
    if frame.elastic is not None:
        told = [readable.replace_unprintable(line)[:width] for line in words.describe_resets(frame.elastic, frame.now)]
        tuner = [*(Text(line, style="dim") for line in told), *tuner]
    groups = [Text(line[:width], style="dim") for line in _describe_groups(frame)]
    if (late := describe_late_steps(frame.late)) is not None:
        groups[:0] = [Text(line, style="dim") for line in textwrap.wrap(f"late steps: {late}", width)]
    notes = _make_warnings(frame)
    if len(notes) > NOTES:
        notes = [*notes[: NOTES - 1], f"and {len(notes) - NOTES + 1} more such lines"]
    foot = [Text(note[:width], style="red") for note in notes]
    pages = frame.reading.pages
    shown = list(pages)
    if height is not None:
        room = height - 2  # the last line stays free, and the table has a head
        least = min(len(pages), LEAST_ROWS)
        for part, kept in ((groups, 0), (tuner, 0), (foot, 0), (head, 1)):  # parts that a low terminal can omit
            del part[max(kept, len(part) - max(0, len(head) + len(foot) + len(groups) + len(tuner) + least - room)) :]
        room = max(1, room - len(head) - len(foot) - len(groups) - len(tuner))
        if len(pages) > room:
            shown = _choose_worst_ranks(frame, max(1, room - 1))
            left = len(pages) - len(shown)
            foot.insert(0, Text(f"{left} ranks that are no slower are not shown"[:width], style="dim"))
    return Group(*head, _draw_table(frame, shown, width), *foot, *groups, *tuner)


# ---- the head and the tuner -----------------------------------------------------------------------------------------


def _describe_job(frame: Frame) -> list[str]:
    """Return figures of the whole job."""
    pages = frame.reading.snapshots
    rates = [rate for rank, rate in frame.rates.items() if frame.state(rank) == "running"]
    sizes = [page["size"] for page in pages.values() if page["size"]]
    count = len(frame.reading.pages)
    world = max(sizes, default=count)
    parts = [readable.replace_unprintable(frame.run)]
    if frame.elastic is not None:
        parts += words.describe_world(frame.elastic, frame.now)
    else:
        parts.append(readable.format_count(count, "rank"))
        if world != count:
            parts.append(f"world size {world}")
    if hosts := frame.hosts:
        parts.append(f"{max(page['hosts'] for page in pages.values())} hosts")
    begun = min((page["started_ns"] for page in pages.values() if page["started_ns"]), default=None)
    if begun is not None:
        parts.append(f"up {readable.format_clock(frame.now - begun / 1e9)}")
    if frame.elastic is None:
        parts.append(f"resets {max((max(0, page['worlds'] - 1) for page in pages.values()), default=0)}")
    if steps := max((page["steps"] for page in pages.values()), default=0):
        parts.append(f"step {steps}")
    if not rates:
        return parts
    if steps:
        parts.append(f"{statistics.median(rate.steps for rate in rates):.1f} steps/s")
    else:
        parts.append(f"{statistics.median(rate.collectives for rate in rates):.3g} collectives/s")
    parts.append(f"{statistics.fmean(rate.nbytes for rate in rates) / 1e9:.3f} GB/s a rank")
    parts.append(f"blocked {readable.format_share(statistics.fmean(rate.blocked for rate in rates))}")
    parts.append(f"exposed communication {readable.format_share(statistics.fmean(rate.exposed for rate in rates))}")
    if hosts and (host := slow_host(frame.crossing)) is not None:
        parts.append(f"most waited for: {_host_name(frame, host)}")
    elif hosts and (link := slow_link(frame.crossing)) is not None:
        parts.append(f"slow link: {' - '.join(_host_name(frame, host) for host in link)}")
    return parts


def _describe_groups(frame: Frame) -> list[str]:
    """Return a line for each of the busiest process sets and groups of torch.distributed."""
    ranks: dict[str, list[int]] = {}
    for rank, page in frame.reading.snapshots.items():
        if frame.state(rank) == "running":
            for name in page.groups:
                ranks.setdefault(name, []).append(rank)
    lines = []
    for name, members in ranks.items():
        rates = [
            frame.rates[rank].groups[name] for rank in members if name in getattr(frame.rates.get(rank), "groups", ())
        ]
        counts = [frame.reading.snapshots[rank].groups[name] for rank in members]
        parts = [readable.format_count(max(each.ranks for each in counts), "rank")]
        if rates:
            parts.append(f"{statistics.median(rate.collectives for rate in rates):.3g} collectives/s")
            parts.append(f"{statistics.fmean(rate.nbytes for rate in rates) / 1e6:.1f} MB/s a rank")
        waiting = [rank for rank, each in zip(members, counts, strict=True) if each.pending]
        if waiting:
            parts.append(f"pending on {readable.format_ranks(waiting)}")
        busy = sum(rate.nbytes for rate in rates), sum(each.nbytes for each in counts)
        lines.append((busy, f"{readable.replace_unprintable(name)}: {', '.join(parts)}"))
    found = [line for _, line in sorted(lines, key=lambda each: each[0], reverse=True)]
    if len(found) > GROUP_LINES:
        found = [*found[: GROUP_LINES - 1], f"and {len(found) - GROUP_LINES + 1} more process sets"]
    return found


def _describe_tuner(frame: Frame) -> list[str]:
    """Return the knobs and the state of the tuner."""
    ranks = {0: 0} if frame.elastic is None else frame.elastic.ranks
    page = next((frame.reading.pages.get(slot) for slot, rank in ranks.items() if rank == 0), None)
    if not isinstance(page, Snapshot):
        return []
    parts = ["knobs:", *(f"{name.removeprefix('--')} {value}" for name, value in words.list_knobs(page))]
    if len(parts) == 1:
        parts = []
    if page.phase == "off":
        return [*parts, "tuner: off"]
    parts += [f"tuner: {page.phase}", f"trials {page['tuner_trials']}", f"changes {page['tuner_changes']}"]
    if page["tuner_changed_ns"]:
        parts.append(f"the last {readable.format_clock(frame.now - page['tuner_changed_ns'] / 1e9)} ago")
    for name, field in (("score", "tuner_score_ps"), ("default", "tuner_default_ps"), ("best", "tuner_best_ps")):
        if page[field]:
            parts.append(f"{name} {readable.format_seconds(page[field] / 1e12)}")
    return parts


def _pack_lines(parts: Sequence[str], width: int) -> list[str]:
    """Pack parts into as few lines as possible."""
    lines: list[str] = []
    for part in parts:
        text = part[:width]
        if lines and not part.startswith("tuner:") and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += ("  " if not lines[-1].endswith(":") else " ") + text
        else:
            lines.append(text)
    return lines


def _make_warnings(frame: Frame) -> list[str]:
    """Return warnings, one line each; ranks with the same warning share a line."""
    found: dict[str, list[int]] = {}
    for rank, page in frame.reading.pages.items():
        state = frame.state(rank)
        if isinstance(page, PageError):
            found.setdefault(f"the page of counters {page}", []).append(rank)
        elif state == "failed" and page is not None:
            found.setdefault(f"failed: {words.describe_failure(page)}", []).append(rank)
        elif state == "gone":
            found.setdefault("the process is gone, without a word", []).append(rank)
        elif state == "stopped":
            found.setdefault("the process is stopped; SIGCONT lets it go on", []).append(rank)
        elif state == "running" and page is not None and page["stalled"]:
            one = page["stalled"] == 1
            found.setdefault(
                f"{page['stalled']} operation{'s' * (not one)} {'is' if one else 'are'} overdue", []
            ).append(rank)
    return [f"{readable.format_ranks(ranks)}: {text}" for text, ranks in found.items()] + _make_remote_notes(frame)


def _make_remote_notes(frame: Frame) -> list[str]:
    """Return notes about missing or old figures of ranks on other hosts."""
    pages = frame.reading.snapshots
    far = [page for page in pages.values() if page.far]
    if far and not any(page["copied_ns"] for page in far) and len(frame.reading.pages) < far[0]["size"]:
        return ["ranks of other hosts are shown there, and all where enginerun was started"]
    old: dict[str, float] = {}
    for page in far:
        age = frame.reading.time - page["copied_ns"] / 1e9
        if page["copied_ns"] and page.state == "running" and age > OLD_SECONDS:
            old[page.host] = age
    return [f"{readable.replace_unprintable(host)}: its figures are {age:.0f} s old" for host, age in old.items()]


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """Column of the table. If not all fit, those with the highest `spare` are dropped first."""

    head: str
    wide: str  # the head if there is room
    width: int
    spare: int
    cell: Callable[[Frame, int, Page, Rates | None], str]
    far: bool = False  # only of jobs on several hosts
    gpu: bool = False  # only of jobs with tensors on a GPU
    elastic: bool = False  # only of elastic jobs


def _format_rate(number: float | None, digits: int) -> str:
    return NONE if number is None else f"{number:.{digits}f}"


def _format_lag(frame: Frame, rank: int, page: Page, rate: Rates | None) -> str:
    mark = " <" if rate is not None and rank == frame.straggler else "  "
    return _format_rate(None if rate is None or rate.lag is None else 1e3 * rate.lag, 2) + mark


def _format_late(frame: Frame, rank: int, page: Page, rate: Rates | None) -> str:
    """Format the number of steps that were late because of this rank; nothing if the program reports no steps."""
    counted = isinstance(page, Snapshot) and page["steps"] > 0
    return str(frame.late[rank].count) if counted and rank in frame.late else NONE


def _make_field_formatter(count: Callable[[Snapshot], int]) -> Callable[[Frame, int, Page, Rates | None], str]:
    return lambda frame, rank, page, rate: str(count(page)) if isinstance(page, Snapshot) else NONE


def _make_rate_formatter(
    figure: Callable[[Rates], float | None], digits: int
) -> Callable[[Frame, int, Page, Rates | None], str]:
    return lambda frame, rank, page, rate: NONE if rate is None else _format_rate(figure(rate), digits)


def _format_steps(frame: Frame, rank: int, page: Page, rate: Rates | None) -> str:
    """Format steps per second; nothing, rather than 0, if the program reports no steps."""
    counted = isinstance(page, Snapshot) and page["steps"] > 0
    return _format_rate(rate.steps if counted and rate is not None else None, 2)


def _host_name(frame: Frame, host: int) -> str:
    return readable.replace_unprintable(frame.hosts.get(host, f"host {host}"))


def _format_host(frame: Frame, rank: int, page: Page, rate: Rates | None) -> str:
    return readable.replace_unprintable(page.host)[:HOST_WIDTH] if isinstance(page, Snapshot) else NONE


def _in_world(frame: Frame, slot: int, page: Page, rate: Rates | None) -> str:
    """Return the rank of a slot's worker in the newest world."""
    rank = -1 if frame.elastic is None else frame.elastic.ranks.get(slot, -1)
    return NONE if rank < 0 else str(rank)


def _make_stage_reader(*stages: str) -> Callable[[Rates], float | None]:
    """Return a reader of the mean milliseconds on the GPU per sampled collective or step."""

    def read_mean(rate: Rates) -> float | None:
        known = [rate.device[stage] for stage in stages if stage in rate.device]
        return 1e3 * sum(known) if known else None

    return read_mean


def _count_errors(page: Snapshot) -> int:
    return page["mismatches"] + (page.state == "failed")


COLUMNS = (
    _Column("rank", "rank", 4, 0, lambda frame, rank, page, rate: str(rank)),
    _Column("in", "in the world", 4, 1, _in_world, elastic=True),
    _Column("host", "host", HOST_WIDTH, 3, _format_host, far=True),
    _Column("steps/s", "steps/s", 7, 5, _format_steps),
    _Column(
        "ms/step",
        "ms a step",
        8,
        2,
        _make_rate_formatter(lambda rate: None if rate.step is None else 1e3 * rate.step, 2),
    ),
    _Column("block%", "blocked %", 6, 4, _make_rate_formatter(lambda rate: 100 * rate.blocked, 1)),
    _Column("expos%", "exposed %", 6, 3, _make_rate_formatter(lambda rate: 100 * rate.exposed, 1)),
    _Column("MB/s", "MB/s", 7, 6, _make_rate_formatter(lambda rate: rate.nbytes / 1e6, 1)),
    _Column("ops/s", "collectives/s", 8, 12, _make_rate_formatter(lambda rate: rate.collectives, 1)),
    _Column("lag ms  ", "lag ms  ", 10, 1, _format_lag),
    _Column("late", "late steps", 4, 5, _format_late),
    _Column(
        "cross%",
        "waited for hosts %",
        6,
        3,
        _make_rate_formatter(lambda rate: 100 * sum(rate.crossing.values()), 1),
        far=True,
    ),
    _Column("net MB/s", "network MB/s", 8, 8, _make_rate_formatter(lambda rate: rate.network / 1e6, 1), far=True),
    _Column(
        "gpu",
        "on GPU",
        4,
        7,
        _make_field_formatter(lambda page: max(0, page["device_entries"] - page["device_passed"])),
        gpu=True,
    ),
    _Column("queue", "GPU queue ms", 7, 8, _make_rate_formatter(_make_stage_reader("queue"), 3), gpu=True),
    _Column(
        "work", "GPU work ms", 7, 6, _make_rate_formatter(_make_stage_reader("pack", "nccl", "unpack"), 3), gpu=True
    ),
    _Column("stood", "GPU exposed ms", 7, 4, _make_rate_formatter(_make_stage_reader("exposed"), 3), gpu=True),
    _Column("pend", "pending", 4, 8, _make_field_formatter(pending)),
    _Column("stall", "stalled", 5, 7, _make_field_formatter(lambda page: page["stalled"])),
    _Column("err", "errors", 3, 9, _make_field_formatter(_count_errors)),
    _Column("new", "new tensors", 6, 11, _make_field_formatter(lambda page: page["requests"])),
    _Column("pid", "pid", 7, 10, _make_field_formatter(lambda page: page["pid"])),
    _Column("state", "state", 10, 0, lambda frame, rank, page, rate: frame.state(rank)),
)


def _draw_table(frame: Frame, shown: Sequence[int], width: int) -> Table:
    """Draw the rows of the given ranks, in columns that fit."""
    on_gpu = any(page.on_gpu for page in frame.reading.snapshots.values())
    columns = [
        column
        for column in COLUMNS
        if (frame.hosts or not column.far)
        and (on_gpu or not column.gpu)
        and (frame.elastic is not None or not column.elastic)
    ]
    wide = False

    def compute_width() -> int:
        return sum(max(each.width, len(each.wide if wide else each.head)) + 1 for each in columns) - 1

    while compute_width() > width and max(each.spare for each in columns):
        columns.remove(max(columns, key=lambda each: each.spare))
    wide = True
    wide = compute_width() <= width
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", collapse_padding=True)
    for column in columns:
        name = column.wide if wide else column.head
        if frame.elastic is not None and column is COLUMNS[0]:
            name = "slot"
        last = column is columns[-1]
        table.add_column(
            name,
            justify="left" if last else "right",
            no_wrap=True,
            overflow="crop",
            width=max(column.width, len(name)),
        )
    late = frame.straggler
    for rank in shown:
        page, rate, state = frame.reading.pages[rank], frame.rates.get(rank), frame.state(rank)
        if state in ("ended", "failed", "gone", "resetting"):
            rate = None
        cells = [Text(column.cell(frame, rank, page, rate)) for column in columns]
        table.add_row(*cells, style=STYLES.get(state, "yellow" if rank == late else ""))
    return table


def _choose_worst_ranks(frame: Frame, count: int) -> list[int]:
    """Return the ranks to show if there is no room for all: those with a fault first, then the slowest."""

    def make_sort_key(rank: int) -> tuple[bool, float, bool]:
        page, rate = frame.reading.pages[rank], frame.rates.get(rank)
        overdue = isinstance(page, Snapshot) and page["stalled"] > 0
        return frame.state(rank) in BAD, (rate.lag or 0.0) if rate is not None else 0.0, overdue

    return sorted(sorted(frame.reading.pages, key=make_sort_key, reverse=True)[:count])


def describe_end(frame: Frame) -> str:
    """Describe the end of a job in one line."""
    found: dict[str, list[int]] = {}
    for rank, page in frame.reading.pages.items():
        state = frame.state(rank)
        text = words.describe_failure(page) if state == "failed" and isinstance(page, Snapshot) else state
        found.setdefault(
            {
                "ended": "ended",
                "running": "gone without a word",
                "resetting": "gone without a word between two worlds",
                "stopped": "gone without a word",
                "gone": "gone without a word",
                "starting": "never started the engine",
                "unreadable": "not known, as the page of counters cannot be read",
            }.get(state, f"failed, as {text}"),
            [],
        ).append(rank)
    outcome = "; ".join(f"{readable.format_ranks(ranks)} {text}" for text, ranks in found.items())
    begun = [page["started_ns"] for page in frame.reading.snapshots.values() if page["started_ns"]]
    after = f" after {readable.format_clock(frame.now - min(begun) / 1e9)}" if begun else ""
    return f"{readable.replace_unprintable(frame.run)} is over{after}: {outcome}"
