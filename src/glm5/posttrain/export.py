"""The trajectory store as files that other programs read: JSONL, and Parquet where pyarrow is installed.

A row is a trajectory: its sample's line of the ledger, and the token by token figures of `record`. A sample without
trajectories has one row, with `part` null and nothing of tokens. Read next: `store`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glm5.posttrain.store import Sample, Store
from glm5.utils.errors import UserError
from glm5.utils.files import make_directory, replacing

ROWS_AT_ONCE = 256  # of a row group of Parquet: what is in memory


def rows(store: Store, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """The rows of these samples, one after another."""
    for sample in samples:
        line = sample.to_json()
        records = store.records(sample.id)
        if not records:
            yield {**line, "part": None}
        for part, record in enumerate(records):
            yield {**line, "part": part, **record.to_json()}


def write_jsonl(store: Store, samples: Sequence[Sample], path: str | Path) -> int:
    """Write the rows to `path`, whole or not at all. Returns how many.

    Raises:
        FileError: it cannot be written.
    """
    path, count = Path(path), 0
    make_directory(path.parent)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows(store, samples):
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def write_parquet(store: Store, samples: Sequence[Sample], path: str | Path) -> int:
    """As `write_jsonl`, in Parquet; `turns` is JSON text.

    Raises:
        UserError: pyarrow is not installed. FileError: it cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise UserError("Parquet needs pyarrow", "Install it: pip install pyarrow, or export JSONL") from None
    text, number, real = pa.string(), pa.int64(), pa.float64()
    schema = pa.schema(
        [(name, text) for name in ("id", "group", "task", "status", "state", "outcome", "detail")]
        + [(name, number) for name in ("oldest", "repeats", "step", "part")]
        + [(name, real) for name in ("started", "delivered", "closed", "reward", "temperature")]
        + [
            ("ids", pa.list_(pa.int32())),
            ("drawn", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(real)),
            ("versions", pa.list_(pa.int32())),
            ("kept", pa.list_(pa.list_(pa.int32()))),
            ("turns", text),
        ]
    )
    path, count = Path(path), 0
    make_directory(path.parent)
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows(store, samples):
            row["turns"] = json.dumps(row["turns"], ensure_ascii=False) if "turns" in row else None
            batch.append(row)
            count += 1
            if len(batch) == ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    return count
