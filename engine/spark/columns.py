"""Conversion of DataFrame columns to NumPy arrays, for the types that can be trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from .manifest import DataError, check_length


def select_numbers(frame: Any, columns: list[str]) -> Any:
    """Return a DataFrame of these columns, each converted by `as_numbers`.

    Raises DataError if a column is missing or has an unsupported type.
    """
    return frame.select(*(as_numbers(frame, name)[0].alias(name) for name in columns))


def as_numbers(frame: Any, name: str) -> tuple[Any, bool]:
    """Return a column as float32 or int64, or as lists of these, and whether its values are integers.

    Vectors of `pyspark.ml` become lists of float32. Raises DataError if the column is missing or has an unsupported
    type.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions, types

    if name not in frame.columns:
        raise DataError(f"the DataFrame has no column {name!r}; it has {', '.join(frame.columns)}")
    whole = (types.BooleanType, types.ByteType, types.ShortType, types.IntegerType, types.LongType)
    real = (types.FloatType, types.DoubleType, types.DecimalType)
    kind, column = frame.schema[name].dataType, functions.col(f"`{name}`")
    if isinstance(kind, VectorUDT):
        return vector_to_array(column, "float32"), False
    listed = isinstance(kind, types.ArrayType)
    value = kind.elementType if listed else kind
    if not isinstance(value, whole + real):
        raise DataError(
            f"column {name!r} is of {kind.simpleString()}: expected numbers, lists of numbers or vectors; index or "
            "assemble it first"
        )
    integers = isinstance(value, whole)
    target = "bigint" if integers else "float"
    return column.cast(f"array<{target}>" if listed else target), integers


def lengths_of(table: Any) -> dict[str, int]:
    """Return the length of the lists of each column of a pyarrow table with rows; 0 for a column of numbers.

    Raises DataError if a value is missing or not finite, lists have different lengths, or a column has neither numbers
    nor lists of them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = {}
    for name in table.schema.names:
        column, kind = table.column(name), table.schema.field(name).type
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        value = kind.value_type if listed else kind
        if not (pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)):
            raise DataError(f"column {name!r} is of {kind}: expected numbers or lists of numbers")
        if column.null_count:
            raise DataError(f"column {name!r} has {column.null_count} rows without a value: drop or fill them")
        lengths[name] = 0
        if listed:
            bounds = pc.min_max(pc.list_value_length(column)).as_py()
            check_length(name, bounds["min"], bounds["max"])
            if bounds["max"] == 0:
                raise DataError(f"column {name!r} has lists without values")
            lengths[name] = int(bounds["max"])
            if pc.list_flatten(column).null_count:
                raise DataError(f"column {name!r} has lists in which a value is missing: drop or fill them")
        if pa.types.is_floating(value):
            values = (pc.list_flatten(column) if listed else column).cast(pa.float32(), safe=False)
            if bad := len(values) - (pc.sum(pc.is_finite(values)).as_py() or 0):
                raise DataError(
                    f"column {name!r} has {bad} values that are NaN or infinite as float32, and would make the whole "
                    "model so: drop or fill these rows"
                )
    return lengths


def integers_of(table: Any) -> dict[str, bool]:
    """Return for each column of a pyarrow.Table that `lengths_of` has accepted, whether it has integers."""
    import pyarrow as pa

    kinds = {field.name: field.type for field in table.schema}
    values = {name: getattr(kind, "value_type", kind) for name, kind in kinds.items()}
    return {name: not pa.types.is_floating(value) for name, value in values.items()}


def to_arrays(table: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Convert each column of a table to a float32 or int64 array, [rows] for numbers, [rows, length] for lists."""
    found = {}
    for name, length in lengths_of(table).items() if table.num_rows else ():
        import pyarrow.compute as pc

        column = table.column(name)
        values = (pc.list_flatten(column) if length else column).to_numpy()
        kind = np.float32 if values.dtype.kind == "f" else np.int64
        found[name] = values.astype(kind, copy=False).reshape((table.num_rows, length) if length else table.num_rows)
    return found
