"""Reduction operations, with the numbers of the native engine."""

from __future__ import annotations

from enum import IntEnum


class Op(IntEnum):
    """Operation by which an allreduce combines the ranks' values.

    `docs/reference/operations.md` defines each for each dtype.
    """

    SUM = 0
    AVERAGE = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    ADASUM = 5


Sum, Average, Min, Max, Product, Adasum = Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT, Op.ADASUM
