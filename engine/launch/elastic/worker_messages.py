"""Validation of workers' messages, which agents pass on to the driver."""

from __future__ import annotations

from typing import Any

from ...config.forms import LARGEST, MOST_PORTS
from ...elastic import events

_NUMBER, _TEXT = (int,), (str,)
_MAYBE_NUMBER = (int, type(None))
# Fields of each kind of message, and their types.
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "ready": {
        "world": _NUMBER,
        "why": _TEXT,
        "text": _TEXT,
        "culprit": _MAYBE_NUMBER,
        "commit": _MAYBE_NUMBER,
        "stalled": (bool,),
        "build": (dict,),
        "port": _NUMBER,
    },
    "joined": {"world": _NUMBER},
    "done": {"world": _NUMBER},
    "committed": {"world": _NUMBER, "commit": _NUMBER},
    "leaving": {},
    "logged": {"value": _TEXT},
}


class WorkerMessageError(Exception):
    """No worker of this version sends such a message."""


def check(said: Any) -> dict[str, Any]:
    """Validate a worker's message, one of `engine.elastic.worker.gate`, and return a copy of it.

    A `WorkerMessageError` is raised if its kind is unknown, or a field is missing or invalid.
    """
    kind = said.get("kind") if isinstance(said, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise WorkerMessageError(f"it says {kind!r}, which is not known here; install the same version")
    for name, kinds in fields.items():
        most = MOST_PORTS if name == "port" else LARGEST
        value = said.get(name)
        bounded = type(value) is not int or 0 <= value <= most
        if name not in said or type(value) not in kinds or not bounded:
            raise WorkerMessageError(f"it says {kind!r} with {name} = {said.get(name)!r}; install the same version")
    if kind == "ready" and said["why"] not in events.Why.__members__:
        raise WorkerMessageError(f"it says {kind!r} because of {said['why']!r}; install the same version")
    return dict(said)


def event_of(worker: int, said: dict[str, Any]) -> events.Event:
    """Return the machine's event for a message that `check` has accepted."""
    match said["kind"]:
        case "ready":
            told = {name: said[name] for name in ("world", "text", "culprit", "commit", "stalled", "build")}
            return events.Ready(worker, why=events.Why[said["why"]], **told)
        case "committed":
            return events.Committed(worker, said["world"], said["commit"])
        case "joined":
            return events.Joined(worker, said["world"])
        case "done":
            return events.Done(worker, said["world"])
        case _:
            return events.Leaves(worker)
