"""Description of a setting, from which its variable, its option and its knob are derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..text import readable
from .forms import Form

PREFIX = "ENGINE_"


def variable_name(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def read(parse: Form, value: Any, source: str) -> Any:
    """Parse a value. On failure, a ConfigError names its source, the value and the expected form."""
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{source} is {readable.quote_value(value)}; expected {error}") from None


def read_variable(environ: Mapping[str, str], name: str, parse: Form) -> Any:
    """Parse a variable that is no setting, such as a launcher's; None if it is not set or blank. Raises like `read`."""
    text = environ.get(name, "").strip()
    return read(parse, text, name) if text else None


@dataclass(frozen=True)
class Option:
    """Option of the launcher for a setting."""

    value: str = ""  # placeholder of the value in the help; empty for a switch, and for words, which are listed
    names: tuple[str, ...] = ()  # names of the option; by default one that is derived from the setting's name
    off: str | None = None  # help of `--no-NAME`; empty: it is not shown; None: there is no such option
    on: bool = True  # whether there is an option besides `--no-NAME`


@dataclass(frozen=True)
class Knob:
    """Search range of the tuner for a setting that can be changed while the engine runs."""

    low: float | None = None  # `low` to `high`: search range of a number; None: the whole range of the setting
    high: float | None = None
    off: float | None = None  # number outside of the range that switches something off, and is tried too
    words: tuple[str, ...] = ()  # words that are tried; empty: all
    host: bool = False  # whether the knob only affects tensors in the host's memory, and not those on a GPU


@dataclass(frozen=True)
class Setting:
    """Metadata of a field of `Config`."""

    name: str
    default: Any
    unit: str
    parse: Form  # parser that converts a value or refuses it (`engine.config.forms`)
    doc: str
    alias: str | None = None  # another environment variable, read if the setting's own is not set
    none: str = "auto"  # word for None in the table of settings
    option: Option | None = None  # None: only `init` and the variable set it
    knob: Knob | None = None  # None: the setting does not change while the engine runs

    @property
    def variable(self) -> str:
        """Environment variable of the setting."""
        return variable_name(self.name)

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the launcher's option; the default name if it has none."""
        return (self.option and self.option.names) or (f"--{self.name.replace('_', '-')}",)

    def read(self, value: Any, source: str | None = None) -> Any:
        """Parse a value. `source` is its name in errors, by default the name of the setting."""
        return read(self.parse, value, source or self.name)


def define_setting(
    default: Any,
    unit: str,
    parse: Form,
    doc: str,
    alias: str | None = None,
    none: str = "auto",
    option: Option | None = None,
    knob: Knob | None = None,
) -> Any:
    """Make a field of `Config`; the parameters are the attributes of `Setting`."""
    about = {"unit": unit, "parse": parse, "doc": doc, "alias": alias, "none": none, "option": option, "knob": knob}
    return field(default=default, metadata=about)
