"""Search that another process drives by messages: JSON objects with the protocol's `version` and a `type`.

| from the trainer | holds | answered by |
|---|---|---|
| `prepare` | | `ready`: slow imports are done |
| `recall` | `job` (a `result_cache.JobKind` without `processor`), `cache` (a directory; null: the user's) | `known` |
| `begin` | `space`, `default`, `first`, `traffic`, `seed`, `max_trials`, `log` (a path, or null), `about`; perhaps \
`spent`, steps that earlier searches of the job have lost; `ran`, steps of the job so far; `settling`, steps after a \
change that no trial counts; `minute`, what a minute is in the unit of samples, null if they are no times | `trial` |
| `told` | `id`, `status`, `samples` of the trial; perhaps `exposed`, the share of waiting | `trial` or `done` |
| `observe` | `samples` of what is deployed, after `done`; perhaps `steps` that passed | `watching`, or `trial` |

The first two are optional, and so is `traffic`, from which a model of the transport (transport_model.py) makes a
suggestion. After `recall`, the result of the search is kept for that job.

| answer | holds |
|---|---|
| `ready` | |
| `known` | `knobs`, or null; `why`: what is known of the job, and how similar the known job is |
| `trial` | `id`, `knobs`, `phase`, `why`, `limit` (seconds, or null); `best` to go back to; `drift`: whether; `lost` |
| `done` | `best`; `gain` and `sure`, shares of a step's time, or null; `trials`, `because`, `log`; `resting`; `lost` |
| `watching` | |
| `failed` | `reason`: the last message |

Each may have `warnings`, a list of texts for the user. A search that is `resting` has trials left, and resumes when the
steps of the job allow it.
`lost` is the number of steps that its trials have lost so far. `gain` is null if nothing is proven better.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import result_cache
from autotune.bounded_reader import ReadError, get_number, get_whole, parse_json

if TYPE_CHECKING:
    from autotune.journal import Journal
    from autotune.policy import Tuner
    from autotune.trials import Settings

VERSION = 2
LIMIT = 1 << 16  # maximum bytes of a message
UNTIMED = 1e9  # length of a minute if samples are not times: the budget then counts only steps
LOGS = 1000  # upper bound of the numbers that distinguish logs of one name


class SessionError(Exception):
    """Error after which the search cannot go on; the text gives the reason for the user."""


class Session:
    """Session with one search, and access to the results of earlier ones."""

    def __init__(self) -> None:
        self._tuner: Tuner | None = None
        self._journal: Journal | None = None
        self._decision: dict[str, Any] = {}
        self._again = False  # whether a search has ended before
        self._drift = False
        self._kept: tuple[Path, result_cache.JobKind] | None = None  # directory and job for which the result is kept
        self._warnings: list[str] = []

    def answer_message(self, data: bytes) -> bytes:
        """Return the answer to a message.

        Raises SessionError if the message is malformed, of another version, or out of sequence; if scipy is missing; or
        if the log cannot be written.
        """
        message = decode_message(data)
        kind = message["type"]
        if kind not in (("prepare", "recall", "begin") if self._tuner is None else ("told", "observe")):
            raise SessionError(f"a message {kind!r} is not expected {'first' if self._tuner is None else 'now'}")
        try:
            answer = getattr(self, f"_handle_{kind}")(message)
            if self._warnings:
                answer["warnings"], self._warnings = self._warnings, []
            return encode_message(answer)
        except KeyError as error:
            raise SessionError(f"a message {kind!r} lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise SessionError(f"a message {kind!r} makes no sense: {error}") from error

    def _handle_prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        _import_tuner()
        return {"type": "ready"}

    def _handle_recall(self, message: dict[str, Any]) -> dict[str, Any]:
        from autotune.journal import read_processor_model

        job = result_cache.JobKind(**message["job"], processor=read_processor_model())
        try:
            home = result_cache.get_default_directory() if message["cache"] is None else Path(message["cache"])
            found, why, skipped = result_cache.find_result(home, job)
        except OSError as error:
            self._warnings.append(f"nothing is recalled or kept: {error.filename}: {error.strerror}")
            return {"type": "known", "knobs": None, "why": "nothing is recalled or kept"}
        self._kept = home, job
        if skipped:
            more = f"; {len(skipped) - 1} more are not used either" if len(skipped) > 1 else ""
            self._warnings.append(f"a result that was kept is not used: {skipped[0]}{more}")
        return {"type": "known", "knobs": None if found is None else found.knobs, "why": why}

    def _handle_begin(self, message: dict[str, Any]) -> dict[str, Any]:
        tuner = _import_tuner()
        from autotune.space import Space
        from autotune.transport_model import find_first_setting
        from autotune.trials import LARGEST_SEED, MOST_TRIALS

        space = Space.from_description(message["space"])
        default, first, about = message["default"], list(message["first"]), dict(message["about"])
        found = find_first_setting(message["traffic"], space, default) if message.get("traffic") else None
        if found is not None:
            about["link"] = asdict(found[0]) | {"suggests": found[1]}
            first += [found[1]] if found[1] not in (default, *first) else []
        if message["log"] is not None:
            self._journal = _open(Path(message["log"]), about)
        self._tuner = tuner(
            space,
            default,
            seed=get_whole(message, "seed", 0, LARGEST_SEED),
            max_trials=get_whole(message, "max_trials", 1, MOST_TRIALS),
            first=first,
            settings=_read_settings(message),
            journal=self._write_row,
        )
        return self._ask_trial()

    def _handle_told(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._tuner is not None
        self._tuner.tell(message["id"], message["samples"], message["status"], message.get("exposed"))
        return self._done() if self._tuner.done else self._ask_trial()

    def _handle_observe(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._tuner is not None
        self._drift = False
        more = self._tuner.observe(message["samples"], message.get("steps"))
        return self._ask_trial() | {"drift": self._drift} if more else {"type": "watching"}

    def _ask_trial(self) -> dict[str, Any]:
        assert self._tuner is not None
        trial = self._tuner.ask()
        return {
            "type": "trial",
            "id": trial.id,
            "knobs": trial.knobs,
            "phase": trial.phase,
            "why": trial.why,
            "limit": trial.limit if math.isfinite(trial.limit) else None,
            "best": self._tuner.best(),
            "lost": self._tuner.lost,
        }

    def _done(self) -> dict[str, Any]:
        assert self._tuner is not None
        row = self._decision
        gain = sure = None
        if "gap" in row:
            gain, sure = -math.expm1(row["gap"]), -math.expm1(row["gap"] + 2 * row["deviation"])
        self._store_result(gain, sure)
        self._again |= not self._tuner.resting
        return {
            "type": "done",
            "resting": self._tuner.resting,
            "best": self._tuner.best(),
            "lost": self._tuner.lost,
            "gain": gain,
            "sure": sure,
            "trials": row["trials"],
            "because": row["because"],
            "log": None if self._journal is None else str(self._journal.path),
        }

    def _store_result(self, gain: float | None, sure: float | None) -> None:
        """Keep the result for the next job.

        A later search without a finding does not replace it. A search that only rests has no result yet, unless it has
        found something.
        """
        assert self._tuner is not None
        if self._kept is None or (gain is None and (self._again or self._tuner.resting)):
            return
        from autotune.journal import describe_environment

        home, job = self._kept
        log = None if self._journal is None else str(self._journal.path)
        knobs, trials, versions = self._tuner.best(), self._decision["trials"], describe_environment()
        try:
            result_cache.store_result(
                home, result_cache.Known(job, knobs, gain, sure, trials, versions={**versions}, log=log)
            )
        except OSError as error:
            self._kept = None
            self._warnings.append(f"what was found cannot be kept in {home}: {error.strerror}")

    def _write_row(self, row: dict[str, Any]) -> None:
        if row["row"] == "decide":
            self._decision = row
            self._drift |= row["decision"] == "reopen"
            self._again |= row["decision"] == "reopen"
        if self._journal is not None:
            try:
                self._journal(row)
            except OSError as error:
                raise SessionError(f"cannot write {self._journal.path}: {error.strerror}") from error


def _import_tuner() -> type[Tuner]:
    """Import the policy, which takes most of the process's start."""
    try:
        from autotune.policy import Tuner
    except ImportError as error:
        raise SessionError(
            f"nothing is tuned: {error.name} is missing: pip install '.[autotune]' in the source tree"
        ) from error
    return Tuner


def _read_settings(message: dict[str, Any]) -> Settings:
    """Return the policy's settings from a message: the job's steps and losses so far, and the length of a minute."""
    from autotune.trials import Settings

    told: dict[str, Any] = {}
    if "spent" in message:
        told["spent"] = get_number(message, "spent", 0)
    for name in ("ran", "settling"):
        if name in message:
            told[name] = get_whole(message, name, 0)
    if "minute" in message:
        told["shortest"] = UNTIMED if message["minute"] is None else get_number(message, "minute", 0)
    return Settings(**told)


def _open(path: Path, about: dict[str, Any]) -> Journal:
    """Open a new log at the path, or at the first free numbered name beside it, since a log has one search."""
    from autotune.journal import Journal

    for place in range(1, LOGS):
        try:
            return Journal(path if place == 1 else path.with_name(f"{path.stem}.{place}{path.suffix}"), about)
        except FileExistsError:
            continue
        except OSError as error:
            raise SessionError(f"cannot write {path}: {error.strerror}") from error
    raise SessionError(f"cannot write {path}: there are {LOGS - 1} logs of that name; remove some")


def encode_message(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    return json.dumps({"version": VERSION, **message}, allow_nan=False).encode()


def decode_message(data: bytes) -> dict[str, Any]:
    """Decode a message.

    Raises SessionError if it is not a JSON object, has another version of the protocol, or has no type.
    """
    try:
        message = parse_json(data)
    except ReadError as error:
        raise SessionError(f"a message is malformed: {error}") from error
    if not isinstance(message, dict):
        raise SessionError(f"a message is malformed: it is an object of JSON, not {type(message).__name__}")
    if message.get("version") != VERSION:
        raise SessionError(f"a message is of version {message.get('version')!r}; this tuner speaks {VERSION}")
    if not isinstance(message.get("type"), str):
        raise SessionError("a message is malformed: it has no type")
    return message
