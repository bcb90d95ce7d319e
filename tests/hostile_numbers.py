"""Numbers that a malicious peer may send: at limits, beside limits, and such that sums and products wrap."""

from __future__ import annotations

import random

EDGES = (0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 4095, 4096, 16_383, 16_384, 65_535, 65_536)


def hostile_number(dice: random.Random, honest: int = 0, bits: int = 64) -> int:
    """Return a number of `bits` bits, at least 0: near an honest one, a power of two or an edge, or any other.

    An honest peer would send `honest`. The number is taken modulo 2^bits, so that -1 becomes the largest.
    """
    step = dice.choice((-8, -2, -1, 0, 1, 2, 8))
    kind = dice.randrange(6)
    if kind == 0:
        number = honest + step
    elif kind == 1:
        number = dice.choice(EDGES) + step
    elif kind == 2:
        number = (1 << dice.randrange(bits)) + step
    elif kind == 3:
        number = -dice.choice(EDGES) + step  # near the end of the type
    elif kind == 4:
        number = (1 << bits) // dice.choice((3, 5, 8, 16, 24, 4096)) + step  # multiplied by a length, it wraps
    else:
        number = dice.getrandbits(bits)
    return number % (1 << bits)


def hostile_text(dice: random.Random, limit: int) -> bytes:
    """Return bytes of a name or text: empty, at the limit, beyond it, or with zeros, escapes or invalid UTF-8."""
    length = dice.choice((0, 1, 7, limit - 1, limit, limit + 1, 2 * limit))
    return bytes(dice.choice((0, 10, 27, 39, 47, 92, 97, 0x80, 0xC3, 0xFF)) for _ in range(length))


NO_NUMBERS = (
    *(
        "nan",
        "-nan",
        "inf",
        "-inf",
        "Infinity",
        "1e400",
        "-1",
        "-0.5",
        "1_000",
        "1_0.5",
        "0x10",
        "0b1",
        "1e",
        "--5",
        "+-1",
    ),
    *(
        "\u0661\u0662",
        "\uff15",
        "\u00b2",
        "five",
        "5 5",
        "1,5",
        "None",
        "True",
        "[5]",
        "{5}",
        "5\x00",
        "\x1b[2J5",
    ),
    *("9" * 19, "9" * 41, "9" * 400, "9" * 5000, str(1 << 63), str(1 << 64), "0." + "0" * 400 + "1", "1e-400x"),
)
"""Texts that are not a number for any setting, option or variable."""
NO_VALUES = (float("nan"), float("inf"), -1, -1.0, 1 << 64, 10**400, 10**5000, True, 1j, [], {}, b"5", object())
"""Values of other types that are not such numbers."""
