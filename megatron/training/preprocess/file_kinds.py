"""Detect file formats by their first bytes: Parquet is read, other binary files are refused."""

from __future__ import annotations

import os

from megatron.core.config.errors import DataError

HEAD_BYTES = 512
_PARQUET = b"PAR1"
_SMALLEST_PARQUET = 12  # both magics, and the length of the footer
_TAR = b"ustar"
_TAR_AT = 257
# (first bytes, description, suggested fix).  Neither JSON nor text can begin with these bytes.
_SIGNATURES = (
    (b"\x1f\x8b", "gzip-compressed", "give it a name that ends in .gz"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "give it a name that ends in .zst"),
    (b"\xfd7zXZ\x00", "xz-compressed", "decompress it"),
    (b"\x04\x22\x4d\x18", "lz4-compressed", "decompress it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "extract it"),
    (b"PK\x03\x04", "a zip archive (or .npz, .pt)", "extract it"),
    (b"PK\x05\x06", "an empty zip archive", "extract it"),
    (b"ARROW1\x00\x00", "an Arrow (Feather) file", "convert it to Parquet or JSON lines"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "convert it to Parquet or JSON lines"),
    (b"FEA1\x00", "a Feather file", "convert it to Parquet or JSON lines"),
    (b"PAR1\x15", "a Parquet file without its end", "copy it again"),
    (b"Obj\x01", "an Avro file", "convert it to Parquet or JSON lines"),
    (b"\x89HDF\r\n", "an HDF5 file", "convert it to Parquet or JSON lines"),
    (b"SQLite format 3\x00", "an SQLite database", "export it as JSON lines"),
    (b"\x93NUMPY", "a numpy array", "write its texts as JSON lines"),
    (b"MMIDIDX\x00", "the index of token files", "give the text that they were made from"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    *((b"\x80" + bytes([i]), "a pickled object", "write it as JSON lines") for i in range(2, 6)),
    *(
        (b"BZh%d1AY&SY" % i, "bzip2-compressed", "decompress it, or compress it with gzip")
        for i in range(1, 10)
    ),
)


def is_parquet(path: str) -> bool:
    """Return whether the file begins and ends as Parquet does, whatever its name."""
    if os.path.getsize(path) < _SMALLEST_PARQUET:
        return False
    with open(path, "rb", buffering=0) as file:
        if file.read(len(_PARQUET)) != _PARQUET:
            return False
        file.seek(-len(_PARQUET), os.SEEK_END)
        return file.read() == _PARQUET


def refuse_binary(path: str, head: bytes, inside: str = "") -> None:
    """Raise DataError if ``head``, the first bytes of a file, is of a known binary format.

    ``inside``, for the message, names the compression that the bytes were in.
    """
    found = next((known for known in _SIGNATURES if head.startswith(known[0])), None)
    if found is None and head[_TAR_AT:].startswith(_TAR):
        found = (_TAR, "a tar archive", "extract it")
    if found is not None:
        raise DataError(f"--input {path} is {found[1]}{inside}, not JSON lines or text: {found[2]}")
