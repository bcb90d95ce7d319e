"""Reduction operations, named and numbered as the native engine knows them."""

from __future__ import annotations

from enum import IntEnum


class Op(IntEnum):
    """How an allreduce combines the ranks' values. `docs/operations.md` says what each does for each dtype."""

    SUM = 0
    AVERAGE = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    ADASUM = 5


Sum, Average, Min, Max, Product, Adasum = Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT, Op.ADASUM
