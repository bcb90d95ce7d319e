"""Policies that can search with a log's answers in place of the tuner, and changed settings for a log."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from autotune.bounded_reader import parse_decimal, parse_natural, shorten_text
from autotune.replay import create_tuner
from autotune.score import estimate_location
from autotune.space import Knobs, Space
from autotune.trials import LARGEST_SEED, MOST_TRIALS, Phase, PolicyError, Settings, Trial

INTERFACE = ("ask", "tell", "done", "best")


class Policy(Protocol):
    """Part of `Tuner` that a search uses; a custom policy needs no more, and need not derive from this class."""

    @property
    def done(self) -> bool:
        """True if the search is over."""

    def ask(self) -> Trial:
        """Return the next trial: an object with `id` and `knobs`, and optionally `limit`, `phase` and `why`."""

    def tell(self, trial_id: int, samples: Sequence[float], status: str = "ok") -> None:
        """Record the samples of a trial."""

    def best(self) -> Knobs:
        """Return the setting to deploy."""


Factory = Callable[[Space, Knobs, int, int], Policy]
"""Callable that creates a policy from the space, the default, a seed and the number of trials."""


class Random:
    """Policy that tries the default, then random settings, and deploys the one that measured best."""

    def __init__(self, space: Space, default: Mapping[str, Any], seed: int, max_trials: int) -> None:
        shares = np.random.default_rng([seed, 5]).random((max_trials - 1, len(space.knobs)))
        self._settings = [space.check(default), *(space.decode(row) for row in space.encode_shares(shares))]
        self._seconds = [math.inf] * max_trials
        self._asked = 0

    @property
    def done(self) -> bool:
        """True if all settings have been asked for."""
        return self._asked == len(self._settings)

    def ask(self) -> Trial:
        """Return the next trial."""
        k, self._asked = self._asked, self._asked + 1
        phase: Phase = "search" if k else "default"
        return Trial(k, self._settings[k], phase, "drawn at random" if k else "what everything is compared with")

    def tell(self, trial_id: int, samples: Sequence[float], status: str = "ok") -> None:
        """Record the samples of a trial."""
        self._seconds[trial_id] = math.exp(estimate_location(np.log(samples)))

    def best(self) -> Knobs:
        """Return the setting that measured best."""
        return dict(self._settings[int(np.argmin(self._seconds))])


class Default(Random):
    """Policy that measures the default once and keeps it."""

    def __init__(self, space: Space, default: Mapping[str, Any], seed: int, max_trials: int) -> None:
        super().__init__(space, default, seed, 1)


POLICIES: dict[str, Factory] = {"random": Random, "default": Default}
"""Policies besides `tuner`, by name."""
LATER = ("after_drift", "background", "interval", "patience")
"""Settings that only matter after the first search, where a replay ends."""


def apply_changes(opened: Mapping[str, Any], changes: Sequence[str], policy: str) -> dict[str, Any]:
    """Return the first row of a log with changed settings.

    A change is NAME=VALUE, where NAME is `seed`, `max_trials` or a field of `Settings`. Raises PolicyError if a name is
    unknown or has no effect for this policy, or a value is not a valid number.
    """
    row = {**opened, "settings": dict(opened["settings"])}
    allowed: dict[str, float] = {"seed": 0, "max_trials": 1}
    if policy == "tuner":
        # Minimum values: 1 for whole numbers, else 0.
        known = {field.name: int(isinstance(field.default, int)) for field in fields(Settings)}
        allowed |= {name: least for name, least in known.items() if name not in LATER}
        allowed["regret_budget"] = 1e-6  # a divisor: not 0
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise PolicyError(f"--set takes NAME=VALUE, not {change!r}")
        if name not in allowed:
            names = ", ".join(sorted(allowed))
            if policy == "tuner" and name in LATER:
                raise PolicyError(f"--set {name} has no effect: the replay ends with the first search")
            raise PolicyError(f"--set {name}: the policy {policy!r} has no such setting; it has {names}")
        whole = name in ("seed", "max_trials") or allowed[name] == 1
        value = (
            parse_natural(text, MOST_TRIALS if name == "max_trials" else LARGEST_SEED) if whole else parse_decimal(text)
        )
        if value is None or value < allowed[name]:
            kind = "a whole number" if whole else "a number"
            raise PolicyError(f"--set {name} takes {kind} of at least {allowed[name]}, not {shorten_text(text)!r}")
        (row if name in ("seed", "max_trials") else row["settings"])[name] = value
    return row


def make_policy(name: str, opened: Mapping[str, Any]) -> Policy:
    """Create a policy by its name, for a search described by a log's first row.

    The name is `tuner`, one of `POLICIES`, or `module:factory` (see `Factory`); modules of the working directory are
    found. Raises PolicyError if there is no such policy, or the factory's result is not one; JournalError if the row is
    invalid.
    """
    if name == "tuner":
        return create_tuner(dict(opened))
    factory = POLICIES.get(name) or _import_factory(name)
    tuner = create_tuner({**opened, "settings": {}})
    policy = factory(tuner.space, dict(tuner.default), tuner.seed, tuner.max_trials)
    missing = [each for each in INTERFACE if not hasattr(policy, each)]
    if missing:
        raise PolicyError(f"--policy {name} has made {policy!r}, which lacks {', '.join(missing)}")
    return policy


def _import_factory(name: str) -> Factory:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise PolicyError(f"--policy takes {', '.join(['tuner', *POLICIES])} or module:factory, not {name!r}")
    with contextlib.suppress(FileNotFoundError):  # the working directory has been removed, so it has no modules
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise PolicyError(f"--policy {name}: {error}") from error
    except AttributeError:
        raise PolicyError(f"--policy {name}: the module {module!r} has no {attribute!r}") from None
    if not callable(factory):
        raise PolicyError(f"--policy {name} is {factory!r}, which cannot be called")
    made_by: Factory = factory
    return made_by
