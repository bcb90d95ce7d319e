"""A search that another process drives, by messages: objects of JSON with the protocol's `version` and a `type`.

| from the trainer | holds | answered by |
|---|---|---|
| `begin` | `space`, `default`, `first`, `seed`, `max_trials`, `log` (a path, or null), `about` | `trial` |
| `told` | `id`, `status`, `samples` of the trial | `trial` or `done` |
| `observe` | `samples` of what is deployed, after `done` | `watching`, or `trial`: there is a drift |

| answer | holds |
|---|---|
| `trial` | `id`, `knobs`, `phase`, `why`, `limit` (seconds, or null); `best` to go back to |
| `done` | `best`; `gain` and `sure`, shares of a step's time, or null: nothing is better; `trials`, `because`, `log` |
| `watching` | |
| `failed` | `reason`: the last message |
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.journal import Journal
    from autotune.policy import Tuner

VERSION = 1
LIMIT = 1 << 16  # bytes of a message
LOGS = 1000  # of one name, at most


class SessionError(Exception):
    """The search cannot go on; says why, for people."""


class Session:
    """One search, from `begin` on."""

    def __init__(self) -> None:
        self._tuner: Tuner | None = None
        self._journal: Journal | None = None
        self._decision: dict[str, Any] = {}

    def answer(self, data: bytes) -> bytes:
        """The answer to a message.

        Raises
        ------
        SessionError
            The message is malformed or of another version, or does not follow from those before it; scipy is missing;
            the log cannot be written.
        """
        message = decoded(data)
        kind = message["type"]
        if (kind == "begin") != (self._tuner is None) or kind not in ("begin", "told", "observe"):
            raise SessionError(f"a message {kind!r} is not expected {'first' if self._tuner is None else 'now'}")
        try:
            return encoded(getattr(self, f"_{kind}")(message))
        except KeyError as error:
            raise SessionError(f"a message {kind!r} lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise SessionError(f"a message {kind!r} makes no sense: {error}") from error

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            from autotune.policy import Tuner
        except ImportError as error:
            raise SessionError(f"autotune needs {error.name}: pip install 'enginerun[autotune]'") from error
        from autotune.space import Space

        space = Space.from_description(message["space"])
        if message["log"] is not None:
            self._journal = _open(Path(message["log"]), message["about"])
        self._tuner = Tuner(
            space,
            message["default"],
            seed=message["seed"],
            max_trials=message["max_trials"],
            first=message["first"],
            journal=self._note,
        )
        return self._ask()

    def _told(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._tuner is not None
        self._tuner.tell(message["id"], message["samples"], message["status"])
        return self._done() if self._tuner.done else self._ask()

    def _observe(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._tuner is not None
        return self._ask() if self._tuner.observe(message["samples"]) else {"type": "watching"}

    def _ask(self) -> dict[str, Any]:
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
        }

    def _done(self) -> dict[str, Any]:
        assert self._tuner is not None
        row = self._decision
        gain = sure = None
        if "gap" in row:
            gain, sure = -math.expm1(row["gap"]), -math.expm1(row["gap"] + 2 * row["deviation"])
        return {
            "type": "done",
            "best": self._tuner.best(),
            "gain": gain,
            "sure": sure,
            "trials": row["trials"],
            "because": row["because"],
            "log": None if self._journal is None else str(self._journal.path),
        }

    def _note(self, row: dict[str, Any]) -> None:
        if row["row"] == "decide":
            self._decision = row
        if self._journal is not None:
            try:
                self._journal(row)
            except OSError as error:
                raise SessionError(f"cannot write {self._journal.path}: {error.strerror}") from error


def _open(path: Path, about: dict[str, Any]) -> Journal:
    """A log at that path or, since a log holds one search, at the first numbered name beside it that is free."""
    from autotune.journal import Journal

    for number in range(1, LOGS):
        try:
            return Journal(path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}"), about)
        except FileExistsError:
            continue
        except OSError as error:
            raise SessionError(f"cannot write {path}: {error.strerror}") from error
    raise SessionError(f"cannot write {path}: there are {LOGS - 1} logs of that name; remove some")


def encoded(message: dict[str, Any]) -> bytes:
    """A message as it travels."""
    return json.dumps({"version": VERSION, **message}, allow_nan=False).encode()


def decoded(data: bytes) -> dict[str, Any]:
    """A message that has come.

    Raises
    ------
    SessionError
        It is no object of JSON, of another version of the protocol, or has no type.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SessionError(f"a message is malformed: {error}") from error
    if not isinstance(message, dict):
        raise SessionError(f"a message is malformed: it is an object of JSON, not {type(message).__name__}")
    if message.get("version") != VERSION:
        raise SessionError(f"a message is of version {message.get('version')!r}; this tuner speaks {VERSION}")
    if not isinstance(message.get("type"), str):
        raise SessionError("a message is malformed: it has no type")
    return message
