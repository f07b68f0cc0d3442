"""Read plain, compressed and Parquet files as pieces of plain bytes."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import BinaryIO

from megatron.core.config.errors import DataError
from megatron.core.optional import require
from megatron.training.preprocess.file_kinds import is_parquet
from megatron.training.preprocess.parquet import json_lines

SUFFIXES = (".gz", ".zst")
_STORED_BYTES = 1 << 14  # of zstandard, read from disk in one call: 4 may stand for 128 KiB


def pieces(path: str, num_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes of a file: decompressed as its name says, Parquet as JSON lines.

    A piece has about ``num_bytes`` bytes; with it comes the position reached in the file on disk.
    Raises DataError if the file is damaged.
    """
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    with open(path, "rb") as raw:
        if path.endswith(".gz"):
            source = iter(partial(gzip.GzipFile(fileobj=raw).read, num_bytes), b"")
        elif path.endswith(".zst"):
            zstandard = require("zstandard", f"--input {path}")
            errors = (*errors, zstandard.ZstdError)
            source = _zstandard_pieces(raw, zstandard)
        elif is_parquet(path):
            yield from json_lines(path)
            return
        else:
            source = iter(partial(raw.read, num_bytes), b"")
        try:
            for piece in source:
                yield piece, raw.tell()
        except errors as error:
            raise DataError(f"{path} is damaged: {error}; copy it again") from error


def _zstandard_pieces(raw: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """Decompress frame by frame: zstandard's own reader accepts a truncated last frame."""
    decompressor = zstandard.ZstdDecompressor()
    frame = None  # None: between two frames
    while stored := raw.read(_STORED_BYTES):
        while stored:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(stored)
            stored = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends inside a compressed frame")


def uncompressed_extension(path: str) -> str:
    """Return the extension without compression: ``.jsonl`` for ``a.jsonl.gz``."""
    stem, extension = os.path.splitext(path)
    return os.path.splitext(stem)[1] if extension in SUFFIXES else extension
