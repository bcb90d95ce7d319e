"""Effect of each operation on each dtype: the documentation states it, and every cell of its table is tested."""

from __future__ import annotations

import pytest

from .operation_table import DTYPES, OPS, PAGE, TABLE, page


def test_the_table_is_complete() -> None:
    assert sorted(dtype for group in TABLE for dtype in group) == sorted(DTYPES)
    assert all(tuple(row) == OPS for row in TABLE.values())


@pytest.mark.skipif(not PAGE.parent.exists(), reason="the documentation is not part of this copy")
def test_the_page_says_what_is_tested() -> None:
    assert PAGE.read_text() == page(), "run tests/parallel/operation_table.py to write docs/operations.md anew"
