"""Names and colours of values that are codes."""

from __future__ import annotations

from engine.metrics.names import COMPRESSIONS, PHASES, STORES

_COLORS = ("text", "blue", "orange", "green", "red", "purple", "yellow")
PHASE_WORDS = {code: (name, _COLORS[code]) for code, name in enumerate(PHASES)}
STORE_WORDS = {code: (name, ("blue", "orange", "green")[code]) for code, name in enumerate(STORES)}
COMPRESSION_WORDS = {
    code: (name, ("blue", "orange", "green", "purple")[code]) for code, name in enumerate(COMPRESSIONS)
}
