"""What is said of a setting, and what follows from it: its variable, its option, whether it is a knob."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError
from .forms import Form

PREFIX = "ENGINE_"


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def read(parse: Form, value: Any, source: str) -> Any:
    """Check a value. A ConfigError names its source, the value and what was expected."""
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{source} is {value!r}; expected {error}") from None


@dataclass(frozen=True)
class Option:
    """How the launcher takes a setting.

    Attributes
    ----------
    value : str
        What the help calls the value; empty for a switch and for words, which name themselves.
    names : tuple of str
        The option, and other names for it; by default the setting's own name.
    off : str or None
        What `--no-NAME` does, as the help says it; empty: it is not shown; None: there is none.
    on : bool
        Whether there is more than `--no-NAME`.
    """

    value: str = ""
    names: tuple[str, ...] = ()
    off: str | None = None
    on: bool = True


@dataclass(frozen=True)
class Knob:
    """That a setting can be changed while the engine runs, and where the tuner searches if not over all that it may be.

    Attributes
    ----------
    low, high : float or None
        Of numbers.
    off : float or None
        A number beside that range which means something else.
    words : tuple of str
    """

    low: float | None = None
    high: float | None = None
    off: float | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What a field of `Config` says.

    Attributes
    ----------
    name : str
    default : Any
    unit, doc : str
    parse : Form
        Reads a value, or refuses it.
    alias : str or None
        Another variable that is read when ours is not set.
    none : str
        The word for None.
    option : Option or None
        None where only `init` and the variable set it.
    knob : Knob or None
        None for what stays as it is while the engine runs.
    """

    name: str
    default: Any
    unit: str
    parse: Form
    doc: str
    alias: str | None = None
    none: str = "auto"
    option: Option | None = None
    knob: Knob | None = None

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return variable(self.name)

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the launcher's option, which is there as `option` says."""
        return (self.option and self.option.names) or (f"--{self.name.replace('_', '-')}",)

    def read(self, value: Any, source: str | None = None) -> Any:
        """Check a value. `source` is what an error calls it, by default the setting's name."""
        return read(self.parse, value, source or self.name)


def setting(
    default: Any,
    unit: str,
    parse: Form,
    doc: str,
    alias: str | None = None,
    none: str = "auto",
    option: Option | None = None,
    knob: Knob | None = None,
) -> Any:
    """A field of `Config`: the parameters are the attributes of `Setting`."""
    about = {"unit": unit, "parse": parse, "doc": doc, "alias": alias, "none": none, "option": option, "knob": knob}
    return field(default=default, metadata=about)
