"""Results of searches, kept from job to job: a small file of JSON for each kind of job, for people to read too.

Homes are shared, by unlike machines and by jobs that run at the same time. So a file's name is its key's, it is written
beside and renamed, and whatever else is found in its place is told once, left alone and does without.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.bounded_reader import parse_json, read_bytes, shorten

SCHEMA = 1
MOST = 500  # files that are kept; the oldest are removed
LARGEST = 1 << 14  # bytes of a file; larger ones are refused
SHOWN = 200  # characters that an error about a file may have
FRUITLESS = 3  # searches in a row without a proof, after which an earlier proof is forgotten
STALE = 3600.0  # seconds after which a temporary file is taken for one whose writer was killed
NAMES = re.compile(r"[0-9a-f]{1,16}-\d+-[0-9a-f]{12}\.json")
BEING_WRITTEN = re.compile(r"\.[0-9a-f]{1,16}-\d+-[0-9a-f]{12}\..+\.tmp")

Value = int | float | str


@dataclass(frozen=True)
class Workload:
    """A kind of job, for which knobs are good: jobs are alike if all fields are equal.

    Attributes
    ----------
    model : str
        Signature of what a step reduces, in hexadecimal digits.
    tensors, bytes : int
        Number and size of the model's tensors: for people, and to compare models.
    ranks, hosts : int
    transport : str
        `shm` within a host; between hosts `tcp`, and how many ranks each of them has.
    processor : str
        Model name of the processor.
    cpus : int
        Number of CPUs on which the job may run.
    version : str
        Version of the engine.
    held : dict
        Knobs that the user has set, which are not tuned.
    """

    model: str
    tensors: int
    bytes: int
    ranks: int
    hosts: int
    transport: str
    processor: str
    cpus: int
    version: str
    held: dict[str, Value]

    def __post_init__(self) -> None:
        _check_texts(self, "model", "transport", "processor", "version")
        _check_counts(self, 0, "tensors", "bytes")
        _check_counts(self, 1, "ranks", "hosts", "cpus")
        _check_knobs(self, "held")
        if not re.fullmatch(r"[0-9a-f]{1,16}", self.model):
            raise ValueError(f"'model' is {self.model!r}, and not up to 16 hexadecimal digits")

    @property
    def machine(self) -> tuple[str, int, str]:
        """The facts on which the time under given knobs depends."""
        return self.processor, self.cpus, self.transport

    @property
    def file(self) -> str:
        """The name of its file."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.model}-{self.ranks}-{digest}.json"


@dataclass(frozen=True)
class Known:
    """The result of a search.

    Attributes
    ----------
    job : Workload
    knobs : dict
        The best known: the default, if nothing was proven better.
    gain, sure : float, optional
        Share of a step's time saved against the default: estimate and lower bound; None: nothing was proven better.
    trials : int
    when : str
        When the search ended: ISO 8601, in UTC.
    versions : dict
        Versions of the libraries that computed it.
    log : str, optional
        Path of the search's log.
    fruitless : int
        Later searches, in a row, that have proven nothing.
    """

    job: Workload
    knobs: dict[str, Value]
    gain: float | None
    sure: float | None
    trials: int
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, Value] = field(default_factory=dict)
    log: str | None = None
    fruitless: int = 0

    def __post_init__(self) -> None:
        _check_knobs(self, "knobs", "versions")
        _check_counts(self, 0, "trials", "fruitless")
        _check_texts(self, "when")
        for name in ("gain", "sure"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value < 1.0):
                raise ValueError(f"{name!r} is {value!r}, and no share of a step's time")
        if (self.gain is None) != (self.sure is None):
            raise ValueError(f"'gain' is {self.gain!r}, and 'sure' {self.sure!r}")
        if datetime.fromisoformat(self.when).tzinfo is None:
            raise ValueError(f"'when' is {self.when!r}, without a time zone")
        if self.log is not None and not isinstance(self.log, str):
            raise ValueError(f"'log' is {self.log!r}, and no path")

    @property
    def found(self) -> str:
        """The result in words."""
        day = self.when.partition("T")[0]
        if self.gain is None:
            return f"on {day} nothing was proven better than the default"
        return f"on {day} a step took {self.gain:.0%} less time than by default"


def directory() -> Path:
    """Where results are kept, unless somebody says otherwise.

    Raises
    ------
    OSError
        There is no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "there is no home directory", "~") from None
    return base / "enginerun" / "autotune"


def remember(home: Path, known: Known) -> None:
    """Keep a result, in place of what was known of the same job.

    What was proven is not given up for a search that proved nothing, which may be the fault of a busy machine: only
    after `FRUITLESS` of them in a row.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = home / known.job.file
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if known.gain is None:
        with contextlib.suppress(OSError, ValueError):
            before = _read(path)
            if before.gain is not None and before.fruitless + 1 < FRUITLESS:
                known = replace(before, fruitless=before.fruitless + 1)
    text = json.dumps({"schema": SCHEMA, **asdict(known)}, indent=1, allow_nan=False) + "\n"
    descriptor, beside = tempfile.mkstemp(suffix=".tmp", prefix=f".{path.stem}.", dir=home)  # of mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _bound(home)


def recall(home: Path, job: Workload) -> tuple[Known | None, str, list[str]]:
    """The best known for a job.

    Returns
    -------
    known : Known or None
    why : str
        Why it is this one, for people.
    skipped : list of str
        What is there and cannot be used: file and reason.

    Raises
    ------
    OSError
        The directory cannot be read. One that is not there is empty.
    """
    results, skipped = read(home)
    offered = [(order, known) for known in results if (order := nearness(known, job)) is not None]
    if not offered:
        return None, "nothing is known of this job, nor of one like it", skipped
    known = min(offered, key=lambda each: (each[0], -datetime.fromisoformat(each[1].when).timestamp()))[1]
    return known, f"{_likeness(known.job, job)}: {known.found}", skipped


def nearness(known: Known, job: Workload) -> tuple[float, ...] | None:
    """The order in which results are offered to a job: the least first; None: not at all.

    The very job, whatever was found for it. Then what was found better than its default, for the same model, on this
    machine before others, with as many ranks before others, the nearest by their ratio. Then, for as many ranks on this
    machine, that of another model, the nearest by the ratio of bytes. Among equals, one with the same knobs held and of
    the same version, and the newest.
    """
    other = known.job
    if other == job:
        return (0.0,)
    if known.gain is None or other.transport != job.transport:
        return None
    details = float(other.held != job.held), float(other.version != job.version)
    if other.model == job.model:
        world = abs(math.log(other.ranks * other.hosts / (job.ranks * job.hosts)))
        return 1.0, float(other.machine != job.machine), world, float(other.hosts != job.hosts), *details
    if (other.machine, other.ranks, other.hosts) == (job.machine, job.ranks, job.hosts):
        return 2.0, abs(math.log((other.bytes + 1) / (job.bytes + 1))), *details
    return None


def _likeness(other: Workload, job: Workload) -> str:
    if other == job:
        return "this job"
    differing = []
    if (other.ranks, other.hosts) != (job.ranks, job.hosts):
        differing.append(f"on {other.ranks} ranks")
    if other.machine != job.machine:
        differing.append(f"on {other.cpus} CPUs of {other.processor}")
    if other.held != job.held:
        differing.append("with other knobs held")
    if other.version != job.version:
        differing.append(f"with version {other.version}")
    if other.model != job.model:
        what = f"another model, of {other.bytes / 1e6:.3g} MB and not {job.bytes / 1e6:.3g} MB"
        return ", ".join([what, *differing])
    return ", ".join(["the same model", *differing])


def read(home: Path) -> tuple[list[Known], list[str]]:
    """All results in a directory, and what is there and cannot be used: file and reason.

    Raises
    ------
    OSError
        The directory cannot be read. One that is not there is empty.
    """
    results: list[Known] = []
    skipped: list[str] = []
    for path in _files(home):
        try:
            results.append(_read(path))
        except FileNotFoundError:
            continue  # forgotten meanwhile
        except OSError as error:
            skipped.append(f"{path}: {error.strerror}")
        except ValueError as error:
            reason = str(error).removeprefix(f"{path}: ")
            skipped.append(f"{path}: {shorten(reason, SHOWN)}")
    return results, skipped


def forget(home: Path) -> int:
    """Remove all results of a directory; how many.

    Raises
    ------
    OSError
        The directory cannot be read, or one cannot be removed.
    """
    paths = _files(home)
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _files(home: Path) -> list[Path]:
    """The files that are ours by name: nothing else in the directory is touched, whoever has named it."""
    try:
        return sorted(home / name for name in os.listdir(home) if NAMES.fullmatch(name))
    except FileNotFoundError:
        return []


def _read(path: Path) -> Known:
    """One file.

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is no result.
    """
    content = parse_json(read_bytes(path, LARGEST))
    if not isinstance(content, dict) or not isinstance(content.get("job"), dict):
        raise ValueError("it is no result of a search")
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        newer = ": a newer version has written it" if isinstance(schema, int) and schema > SCHEMA else ""
        raise ValueError(f"it is of schema {schema!r}, not {SCHEMA}{newer}")
    try:
        known = Known(**{**content, "job": Workload(**content["job"])})
    except TypeError as error:  # fields that are missing, or too many
        raise ValueError(str(error).partition("() ")[2] or str(error)) from None
    if known.job.file != path.name:
        raise ValueError(f"it holds what belongs into {known.job.file}")
    return known


def _bound(home: Path) -> None:
    """Remove the oldest beyond `MOST`, and what writers that were killed have left."""
    with contextlib.suppress(OSError):
        kept, late = [], time.time() - STALE
        with os.scandir(home) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another job removes, too
                    written = entry.stat(follow_symlinks=False).st_mtime
                    if NAMES.fullmatch(entry.name):
                        kept.append((written, entry.path))
                    elif BEING_WRITTEN.fullmatch(entry.name) and written < late:
                        os.unlink(entry.path)
        for _, path in sorted(kept)[: max(0, len(kept) - MOST)]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _check_texts(of: object, *names: str) -> None:
    for name in names:
        if not _is_text(getattr(of, name)):
            raise ValueError(f"{name!r} is {getattr(of, name)!r}, and no text")


def _check_counts(of: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(of, name)
        if not isinstance(value, int) or not _is_number(value) or value < least:
            raise ValueError(f"{name!r} is {value!r}, and no number of at least {least}")


def _check_knobs(of: object, *names: str) -> None:
    for name in names:
        knobs = getattr(of, name)
        if not isinstance(knobs, dict):
            raise ValueError(f"{name!r} is {knobs!r}, and no object")
        for knob, value in knobs.items():
            if not _is_text(knob) or not (_is_text(value) or _is_number(value)):
                raise ValueError(f"{name!r} has {knob}={value!r}, and neither a number nor a text")


def _is_text(value: Any) -> bool:
    """One line, that a terminal shows as it is."""
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value)
