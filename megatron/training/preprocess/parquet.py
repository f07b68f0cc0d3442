"""Parquet files as JSON lines: a row is a record of the text columns.

Columns of other types cannot be read with --json-keys and are not decoded.  Rows come in batches
from one row group after the other, so memory does not grow with the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from megatron.core.config.errors import DataError
from megatron.core.optional import require

_ROWS_AT_ONCE = 1024


class ParquetLines:
    """The bytes of ``{"text": ..., ...}`` lines, one for each row of a file."""

    def __init__(self, path: str) -> None:
        wanted_by = f"--input {path} is a Parquet file"
        self._arrow = require("pyarrow", wanted_by)
        parquet = require("pyarrow.parquet", wanted_by)
        self._path = path
        self._stored_bytes = os.path.getsize(path)
        try:
            # Without threads: the workers that encode are forked while the file is open.
            self._file = parquet.ParquetFile(path, pre_buffer=False)
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._damaged(error) from error
        self._num_rows = 0
        self._lines = self._read_lines()
        self._ready = bytearray()

    def read(self, num_bytes: int) -> bytes:
        """The next bytes, fewer than asked for at the end; all that are left for -1."""
        while num_bytes < 0 or len(self._ready) < num_bytes:
            lines = next(self._lines, None)
            if lines is None:
                break
            self._ready += lines
        taken = len(self._ready) if num_bytes < 0 else num_bytes
        data = bytes(self._ready[:taken])
        del self._ready[:taken]
        return data

    def stored_position(self) -> int:
        """The share of the file that the rows read so far are."""
        total = self._file.metadata.num_rows
        return self._stored_bytes * self._num_rows // total if total else self._stored_bytes

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_lines(self) -> Iterator[bytes]:
        schema = self._file.schema_arrow
        columns = [field.name for field in schema if self._is_text(field.type)]
        if not columns:
            raise DataError(
                f"--input {self._path} has no column of text or lists of text: its columns are "
                + ", ".join(f"{field.name} ({field.type})" for field in schema)
            )
        try:
            batches = self._file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False)
            for batch in batches:
                rows = batch.to_pylist()
                self._num_rows += len(rows)
                yield "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
            return self._is_text(kind.value_type)
        return types.is_string(kind) or types.is_large_string(kind)

    def _damaged(self, error: Exception) -> DataError:
        return DataError(
            f"{self._path} is damaged after row {getattr(self, '_num_rows', 0)}: {error}; "
            "copy it again"
        )
