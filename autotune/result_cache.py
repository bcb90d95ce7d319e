"""Results of searches, kept across jobs: a small, readable JSON file for each kind of job.

Home directories are shared by different machines and by concurrent jobs. So a file is named after its key and replaced
atomically. Any other file in its place is reported once, left alone, and not used.
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

from autotune.bounded_reader import parse_json, read_bytes, shorten_text

SCHEMA = 1
MOST = 500  # maximum number of files; the oldest are removed
LARGEST = 1 << 14  # maximum bytes of a file; larger ones are refused
SHOWN = 200  # maximum characters of an error about a file
FRUITLESS = 3  # consecutive searches without a proof after which an earlier proof is dropped
STALE = 3600.0  # seconds after which the writer of a temporary file is considered dead
NAMES = re.compile(r"[0-9a-f]{1,16}-\d+-[0-9a-f]{12}\.json")
BEING_WRITTEN = re.compile(r"\.[0-9a-f]{1,16}-\d+-[0-9a-f]{12}\..+\.tmp")

Value = int | float | str


@dataclass(frozen=True)
class JobKind:
    """Kind of job for which knobs are good; jobs are of the same kind if all fields are equal."""

    model: str  # signature of the tensors reduced in a step, in hexadecimal digits
    tensors: int  # number of the model's tensors, for reports and to compare models
    bytes: int  # their size, likewise
    ranks: int
    hosts: int
    transport: str  # `shm` within a host; between hosts `tcp` with the number of ranks of each
    processor: str  # model name
    cpus: int  # number of CPUs on which the job may run
    version: str  # version of the engine
    held: dict[str, Value]  # knobs that the user has set, which are not tuned

    def __post_init__(self) -> None:
        _check_texts(self, "model", "transport", "processor", "version")
        _check_counts(self, 0, "tensors", "bytes")
        _check_counts(self, 1, "ranks", "hosts", "cpus")
        _check_knobs(self, "held")
        if not re.fullmatch(r"[0-9a-f]{1,16}", self.model):
            raise ValueError(f"'model' is {self.model!r}, and not up to 16 hexadecimal digits")

    @property
    def machine(self) -> tuple[str, int, str]:
        """Facts on which the time under given knobs depends."""
        return self.processor, self.cpus, self.transport

    @property
    def file(self) -> str:
        """Name of the file for this kind of job."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.model}-{self.ranks}-{digest}.json"


@dataclass(frozen=True)
class Known:
    """Result of a search."""

    job: JobKind
    knobs: dict[str, Value]  # best known ones: the default if nothing was proven better
    gain: float | None  # share of a step's time saved against the default; None: nothing was proven better
    sure: float | None  # lower bound of `gain`
    trials: int
    # Time at which the search ended: ISO 8601, in UTC
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, Value] = field(default_factory=dict)  # versions of the libraries that computed the result
    log: str | None = None  # path of the search's log
    fruitless: int = 0  # number of later, consecutive searches without a proof

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
        """Description of the result for the user."""
        day = self.when.partition("T")[0]
        if self.gain is None:
            return f"on {day} nothing was proven better than the default"
        return f"on {day} a step took {self.gain:.0%} less time than by default"


def get_default_directory() -> Path:
    """Return the default directory of results; raise OSError if there is no home directory."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "there is no home directory", "~") from None
    return base / "enginerun" / "autotune"


def store_result(home: Path, known: Known) -> None:
    """Store a result, replacing an earlier one of the same job; raise OSError if it cannot be written.

    A proven result is not replaced by a search without a proof, which may be due to a busy machine; only after
    `FRUITLESS` such searches in a row.
    """
    path = home / known.job.file
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if known.gain is None:
        with contextlib.suppress(OSError, ValueError):
            before = _read(path)
            if before.gain is not None and before.fruitless + 1 < FRUITLESS:
                known = replace(before, fruitless=before.fruitless + 1)
    text = json.dumps({"schema": SCHEMA, **asdict(known)}, indent=1, allow_nan=False) + "\n"
    descriptor, beside = tempfile.mkstemp(suffix=".tmp", prefix=f".{path.stem}.", dir=home)  # with mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _remove_old_files(home)


def find_result(home: Path, job: JobKind) -> tuple[Known | None, str, list[str]]:
    """Return the best known result for a job, or None; the reason for this choice; and what cannot be used.

    The reason is for the user. Each file that cannot be used comes with its reason. Raises OSError if the directory
    cannot be read; a missing one counts as empty.
    """
    results, skipped = read(home)
    offered = [(order, known) for known in results if (order := compute_nearness(known, job)) is not None]
    if not offered:
        return None, "nothing is known of this job, nor of one like it", skipped
    known = min(offered, key=lambda each: (each[0], -datetime.fromisoformat(each[1].when).timestamp()))[1]
    return known, f"{_describe_difference(known.job, job)}: {known.found}", skipped


def compute_nearness(known: Known, job: JobKind) -> tuple[float, ...] | None:
    """Return the sort key of a result for a job, the best match least; None if it does not apply.

    First comes the same job, whatever its result. Then results better than the default for the same model: this machine
    before others, then the nearest number of ranks by ratio. Then, with the same ranks on this machine, results for
    other models, the nearest by the ratio of bytes. Ties are broken by the same knobs held, the same version, and age
    (the newest).
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


def _describe_difference(other: JobKind, job: JobKind) -> str:
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
    """Read all results in a directory, and list the files that cannot be used, with the reasons.

    Raises OSError if the directory cannot be read; a missing one counts as empty.
    """
    results: list[Known] = []
    skipped: list[str] = []
    for path in _list_result_files(home):
        try:
            results.append(_read(path))
        except FileNotFoundError:
            continue  # removed in the meantime
        except OSError as error:
            skipped.append(f"{path}: {error.strerror}")
        except ValueError as error:
            reason = str(error).removeprefix(f"{path}: ")
            skipped.append(f"{path}: {shorten_text(reason, SHOWN)}")
    return results, skipped


def remove_results(home: Path) -> int:
    """Remove all results of a directory, and return their number; a missing directory counts as empty.

    Raises OSError if the directory cannot be read, or a file cannot be removed.
    """
    paths = _list_result_files(home)
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _list_result_files(home: Path) -> list[Path]:
    """Return the files that are results by their names; nothing else in the directory is touched."""
    try:
        return sorted(home / name for name in os.listdir(home) if NAMES.fullmatch(name))
    except FileNotFoundError:
        return []


def _read(path: Path) -> Known:
    """Read one file; raise OSError if it cannot be read, and ValueError if it is not a result."""
    content = parse_json(read_bytes(path, LARGEST))
    if not isinstance(content, dict) or not isinstance(content.get("job"), dict):
        raise ValueError("it is no result of a search")
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        newer = ": a newer version has written it" if isinstance(schema, int) and schema > SCHEMA else ""
        raise ValueError(f"it is of schema {schema!r}, not {SCHEMA}{newer}")
    try:
        known = Known(**{**content, "job": JobKind(**content["job"])})
    except TypeError as error:  # missing or unknown fields
        raise ValueError(str(error).partition("() ")[2] or str(error)) from None
    if known.job.file != path.name:
        raise ValueError(f"it holds what belongs into {known.job.file}")
    return known


def _remove_old_files(home: Path) -> None:
    """Remove the oldest files beyond `MOST`, and temporary files of dead writers."""
    with contextlib.suppress(OSError):
        kept, late = [], time.time() - STALE
        with os.scandir(home) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another job has removed it
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
    """Return whether a value is a text of one line that a terminal shows unchanged."""
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value)
