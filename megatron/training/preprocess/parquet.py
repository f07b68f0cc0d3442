"""Read Parquet files as JSON lines: a row is a record of the text columns.

Columns of other types cannot be read with --json-keys and are not decoded.  Rows are read in
batches from one row group after the other, so memory does not grow with the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megatron.core.config.errors import DataError
from megatron.core.optional import require

_ROWS_AT_ONCE = 64  # one dictionary entry may stand for all of them


def json_lines(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield ``{"text": ..., ...}`` lines of a batch of rows, and the bytes read so far."""
    wanted_by = f"--input {path} is a Parquet file"
    arrow = require("pyarrow", wanted_by)
    parquet = require("pyarrow.parquet", wanted_by)
    num_rows, stored_bytes = 0, os.path.getsize(path)
    try:
        # Without threads: workers are forked while the file is open.
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            columns = _text_columns(path, file.schema_arrow, arrow.types)
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
                rows = batch.to_pylist()
                num_rows += len(rows)
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                yield lines.encode(), stored_bytes * num_rows // file.metadata.num_rows
    except MemoryError:
        raise DataError(
            f"{path}: {_ROWS_AT_ONCE} rows after row {num_rows} do not fit into memory: cut its "
            "texts"
        ) from None
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged after row {num_rows}: {error}; copy it again"
        ) from error


def _text_columns(path: str, schema: Any, types: ModuleType) -> list[str]:
    columns = [field.name for field in schema if _is_text(field.type, types)]
    if not columns:
        raise DataError(
            f"--input {path} has no column of text or lists of text: its columns are "
            + ", ".join(f"{field.name} ({field.type})" for field in schema)
        )
    return columns


def _is_text(kind: Any, types: ModuleType) -> bool:
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _is_text(kind.value_type, types)
    return bool(types.is_string(kind) or types.is_large_string(kind))
