"""Changes of files: bytes, JSON values, numbers of pickles, and what stands in place of a file.

Each is a function of a random generator and of what it changes, so that a seed repeats a case.
"""

from __future__ import annotations

import copy
import io
import json
import pickletools
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

INTEGERS = (
    *(-1, 0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63),
    *(2**64, -(2**63), 10**400),
)
TEXTS = (
    *("", "..", "../x", "/etc/passwd", "a/b", ".", "x" * 5000, "\0", "\ud800", "7", "NaN", "F32"),
    *("BF16", "I64", "Q9", "__metadata__", "{}", "%s", "\u0663", "1e999", "none"),
)
VALUES: tuple[Any, ...] = (
    *INTEGERS, *TEXTS, None, True, False, 1.5, -0.0, float("nan"), float("inf"), [], {}, [[]],
    {"a": 1}, [1, 2, 3], [-1], [2**62, 4],
)  # fmt: skip
_DEEP = 100_000


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Truncated, extended, or with other bits, bytes or stretches."""
    kind = rng.choice(("cut", "bits", "byte", "insert", "delete", "repeat", "zero", "empty", "add"))
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    changed = bytearray(data)
    if kind == "cut":
        return data[:at]
    if kind == "empty" or not data:
        return b""
    if kind == "add":
        return data + rng.randbytes(rng.choice((1, 8, 4096)))
    if kind == "bits":
        for _ in range(rng.choice((1, 1, 1, 4, 32))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        changed[min(at, len(data) - 1)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == "insert":
        changed[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))
    elif kind == "delete":
        del changed[at : min(end, at + rng.choice((1, 8, 100, len(data))))]
    elif kind == "repeat":
        changed[end:end] = data[at:end]
    else:
        changed[at:end] = bytes(end - at)
    return bytes(changed)


def change_json(data: bytes, rng: random.Random) -> bytes:
    """Another value, type, key or nesting somewhere in the JSON ``data``."""
    root = [json.loads(data)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change_node(root, rng)
    text = json.dumps(root[0])
    kind = rng.randrange(40)
    if kind == 0:
        text = "[" * _DEEP + text + "]" * _DEEP
    elif kind == 1:
        text = '{"a":' * _DEEP + text + "}" * _DEEP
    elif kind == 2:
        text = text.replace("null", "1" * 5000, 1)
    return text.replace(_SECOND, "").encode()


_SECOND = "\\u0001second"  # makes a key twice what it is, once it is left out


def _change_node(root: list[Any], rng: random.Random) -> None:
    places = list(_places(root))
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
        if holder is root:
            root.append(None)
    elif kind == 1:
        other, where = rng.choice(places)
        # Copies: one may lie inside the other.
        holder[key], other[where] = copy.deepcopy(other[where]), copy.deepcopy(holder[key])
    elif kind == 2:
        other, where = rng.choice(places)
        holder[key] = copy.deepcopy(other[where])
    elif kind == 3 and isinstance(holder, dict):
        holder[f"{key}\x01second"] = copy.deepcopy(rng.choice((holder[key], rng.choice(VALUES))))
    elif kind == 3:
        holder.insert(0, copy.deepcopy(holder[key]))
    elif kind == 4 and type(holder[key]) in (int, float):
        holder[key] += rng.choice((-1, 1, -8, 8, 64, 2**31, 2**63))
    elif kind == 5:
        holder[key] = [holder[key]]
    elif kind == 6 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))


def _places(tree: Any) -> Any:
    """(container, key) of every value; the same number of each level, as deep ones are many."""
    level = [tree]
    while level:
        below = []
        for holder in level[:200]:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            for key in list(keys)[:200]:
                yield holder, key
                if isinstance(holder[key], dict | list):
                    below.append(holder[key])
        level = below


def change_pickle(data: bytes, rng: random.Random) -> bytes:
    """Other integers, texts or opcodes in the pickle ``data``."""
    sizes = {"BININT": "<i", "BININT1": "<B", "BININT2": "<H"}
    found = list(pickletools.genops(data))
    changed = bytearray(data)
    numbers = [(op, at) for op, _, at in found if op.name in sizes]
    texts = [(arg, at) for op, arg, at in found if "UNICODE" in op.name and arg]
    for _ in range(rng.choice((1, 1, 2, 5))):
        if rng.random() < 0.6 and numbers:
            op, at = rng.choice(numbers)
            layout = sizes[op.name]
            bits = 8 * struct.calcsize(layout)
            value = rng.choice(
                (0, 1, 2, 3, 4, 8, 64, 255, 2**16 - 1, 2**31 - 1, rng.getrandbits(31))
            )
            struct.pack_into(layout, changed, at + 1, value % (2 ** (bits - (layout == "<i"))))
        elif rng.random() < 0.7 and texts:
            arg, at = rng.choice(texts)
            encoded = arg.encode("utf-8", "surrogatepass")
            at = data.index(encoded, at)
            changed[at + rng.randrange(len(encoded))] = rng.randrange(32, 127)
        else:
            _, _, at = rng.choice(found)
            changed[at] = rng.choice(b"}])(N.te0KJGXq\x85\x86\x87\x88\x89RbsuQ")
    return bytes(changed)


def change_archive(data: bytes, rng: random.Random) -> bytes:
    """A file of torch.save whose pickle or records are others, with checksums that fit."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    if rng.random() < 0.8:
        records[pickled] = change_pickle(records[pickled], rng)
    else:
        name = rng.choice(list(records))
        if rng.random() < 0.5:
            del records[name]
        else:
            records[name] = change_bytes(records[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return out.getvalue()


def replace_file(path: Path, rng: random.Random) -> str:
    """Put something else in place of the file; what it is."""
    kind = rng.choice(("nothing", "directory", "loop", "another file"))
    others = [p for p in path.parent.iterdir() if p.is_file() and p != path]
    if kind == "another file" and others:
        shutil.copy(rng.choice(sorted(others)), path)
        return kind
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    return kind
