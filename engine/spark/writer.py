"""Writer of a DataFrame as Parquet files for the ranks: executors write them, without a copy through the driver.

The DataFrame is evaluated once, and split into training and validation in that pass, since another evaluation may give
other rows. The manifest says which files are valid. It is made of the results of the tasks that Spark counted as done.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors.formatting import exception_text
from .columns import lengths_of, select_numbers
from .manifest import NAME, TRAIN, VALIDATION, DataError, Manifest, Part, check_length
from .store import Store

ROWS_PER_GROUP = 4096
BYTES_PER_GROUP = 64 << 20  # rows of images are large, and a rank holds a few groups in memory
SPLIT = "__engine_validation__"  # temporary column that marks validation rows for the tasks


@dataclass(frozen=True)
class _Writing:
    """Instructions for the tasks."""

    store: Store
    path: str  # path of the data set, below the store
    share: float  # share of the rows that are for validation, drawn at random; 0 if a column marks them
    seed: int
    rows_per_group: int  # maximum of a row group
    bytes_per_group: int  # maximum of a row group


def write(
    frame: Any,
    store: Store,
    path: str,
    columns: list[str],
    validation: float | str | None = None,
    seed: int = 0,
    rows_per_group: int = ROWS_PER_GROUP,
    bytes_per_group: int = BYTES_PER_GROUP,
) -> Manifest:
    """Write columns of a DataFrame into a store, and their manifest beside them; the directory's content is replaced.

    The columns have numbers, lists of numbers of one length, or vectors. `validation` is the share of the rows that are
    for validation, drawn at random with `seed`; or a column that is true, or more than 0, in these rows. A row group,
    which is the unit that ranks read, has at most `rows_per_group` rows and `bytes_per_group` bytes. Raises DataError
    if rows cannot be trained on, or the split is invalid.
    """
    share = 0.0 if validation is None or isinstance(validation, str) else float(validation)
    if not 0 <= share < 1:
        raise DataError(f"validation is {validation!r}; expected a share of at least 0 and below 1, or a column's name")
    columns = [*dict.fromkeys(columns)]  # a column may be both feature and label
    chosen = select_numbers(frame, columns)
    if isinstance(validation, str):
        chosen = _with_split(frame, columns, validation)
    store.remove(path)
    store.fs.makedirs(store.get_full_path(path), exist_ok=True)
    writing = _Writing(store, path, share, seed, rows_per_group, bytes_per_group)

    def run_task(batches: Any) -> Any:
        return _write_partition(writing, batches)

    try:
        rows = chosen.mapInArrow(run_task, "part string, problem string").collect()
    except Exception as error:
        raise RuntimeError(f"the data could not be written to {store.prefix_path}: {exception_text(error)}") from error
    problems = [row.problem for row in rows if row.problem]
    if problems:
        raise DataError(problems[0])
    found = [json.loads(row.part) for row in rows]
    manifest = Manifest.combine_parts(Part(**part | {"groups": tuple(part["groups"])}) for part in found)
    store.fs.invalidate_cache()
    there = {name.rpartition("/")[2] for name in store.fs.ls(store.get_full_path(path), detail=False)}
    if lacking := [part.name for part in manifest.parts if part.name not in there]:
        raise DataError(
            f"executors have written {path}/{lacking[0]} into {store.prefix_path}, and it is not there on the driver: "
            "the store must be one place for driver and all executors, such as a shared directory or an object store"
        )
    store.write(f"{path}/{NAME}", manifest.to_json().encode())
    return manifest


def _with_split(frame: Any, columns: list[str], validation: str) -> Any:
    """Return a DataFrame of the columns, and one that marks the validation rows."""
    from pyspark.sql import functions

    if validation not in frame.columns:
        raise DataError(f"validation is {validation!r}, and the DataFrame has no such column")
    split = functions.coalesce(functions.col(f"`{validation}`").cast("float") > 0, functions.lit(False))
    return select_numbers(frame.withColumn(SPLIT, split), [*columns, SPLIT])


def _write_partition(writing: _Writing, batches: Iterable[Any]) -> Iterator[Any]:
    """Write one partition, in its task. A problem with the rows is returned, not raised, since a retry is useless."""
    import pyarrow as pa

    try:
        parts, problem = _Partition(writing).write(batches), ""
    except DataError as error:
        parts, problem = [], str(error)
    texts = [json.dumps(asdict(part)) for part in parts] or ([""] if problem else [])
    if texts:
        yield pa.RecordBatch.from_pydict({"part": texts, "problem": [problem] * len(texts)})


class _Partition:
    """Files of one partition: one for each split that has rows."""

    def __init__(self, writing: _Writing) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        self._writing = writing
        self._number = context.partitionId()
        # Spark may retry a task, or run it twice at once: every attempt has files of its own.
        self._attempt = f"{context.attemptNumber()}-{uuid.uuid4().hex[:8]}"
        self._random = np.random.default_rng((writing.seed, self._number))
        self._lengths: dict[str, int] = {}
        self._most = writing.rows_per_group  # rows of a row group
        self._waiting: dict[str, list[Any]] = {TRAIN: [], VALIDATION: []}
        self._groups: dict[str, list[int]] = {TRAIN: [], VALIDATION: []}
        self._files: dict[str, tuple[str, Any, Any]] = {}

    def write(self, batches: Iterable[Any]) -> list[Part]:
        """Write all batches; raise DataError if rows cannot be trained on."""
        for batch in batches:
            if batch.num_rows:
                for column, length in lengths_of(batch).items():
                    check_length(column, self._lengths.setdefault(column, length), length)
                row = batch.nbytes // batch.num_rows
                self._most = min(self._writing.rows_per_group, max(1, self._writing.bytes_per_group // max(1, row)))
                for split, rows in self._split(batch):
                    self._waiting[split].append(rows)
                    self._flush(split, self._most)
        parts = []
        for split in self._waiting:
            self._flush(split, 1)
            if split in self._files:
                name, file, writer = self._files[split]
                writer.close()
                file.close()
                lengths = {column: length for column, length in self._lengths.items() if column != SPLIT}
                parts.append(Part(name, split, tuple(self._groups[split]), lengths))
        return parts

    def _split(self, batch: Any) -> Iterator[tuple[str, Any]]:
        import pyarrow as pa

        if SPLIT in batch.schema.names:
            validates = batch.column(SPLIT).to_numpy(zero_copy_only=False) > 0
            batch = batch.drop_columns([SPLIT])
        else:
            validates = self._random.random(batch.num_rows) < self._writing.share
        for split, mask in ((TRAIN, ~validates), (VALIDATION, validates)):
            if mask.any():
                yield split, batch.filter(pa.array(mask))

    def _flush(self, split: str, least: int) -> None:
        """Write row groups while at least `least` rows are waiting."""
        import pyarrow as pa

        waiting, most = self._waiting[split], self._most
        if sum(batch.num_rows for batch in waiting) < least:
            return
        table = pa.Table.from_batches(waiting)
        begin = 0
        while table.num_rows - begin >= least:
            group = table.slice(begin, most)
            self._open(split, table.schema)[2].write_table(group, row_group_size=most)
            self._groups[split].append(group.num_rows)
            begin += group.num_rows
        self._waiting[split] = table.slice(begin).to_batches()

    def _open(self, split: str, schema: Any) -> tuple[str, Any, Any]:
        import pyarrow.parquet as pq

        if split not in self._files:
            name = f"{split}-{self._number:05d}-{self._attempt}.parquet"
            store = self._writing.store
            file = store.fs.open(store.get_full_path(f"{self._writing.path}/{name}"), "wb")
            self._files[split] = name, file, pq.ParquetWriter(file, schema)
        return self._files[split]
