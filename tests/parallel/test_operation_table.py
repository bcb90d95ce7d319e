"""Effect of each operation on each dtype: the documentation states it, and every cell of its table is tested."""

from __future__ import annotations

import re

import pytest

from .operation_table import DTYPES, OPS, PAGE, TABLE, describe_table


def test_the_table_is_complete() -> None:
    assert sorted(dtype for group in TABLE for dtype in group) == sorted(DTYPES)
    assert all(tuple(row) == OPS for row in TABLE.values())


@pytest.mark.skipif(not PAGE.parent.exists(), reason="the documentation is not part of this copy")
def test_the_page_says_what_is_tested() -> None:
    (table,) = re.findall(r"<!-- operations.*?-->\n(.*?)\n<!--", PAGE.read_text(), re.DOTALL)
    assert table == describe_table(), "python -m tests.parallel.operation_table prints the table"
