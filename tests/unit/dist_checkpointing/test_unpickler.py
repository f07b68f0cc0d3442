"""Pickles from outside: what Megatron-LM writes is understood, nothing is called or imported."""

from __future__ import annotations

import argparse
import pickletools
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    MappedFile,
    load_archive,
    save_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.unpickler import unpickle


def saved(path: Path, value: Any) -> Any:
    """What `load_archive` makes of what torch.save wrote."""
    torch.save(value, path)
    return load_archive(MappedFile(path))


class Bomb:
    """Unpickled the ordinary way it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.feature("Checkpoints: a pickle from outside runs no code, unknown objects are named")
def test_a_pickle_that_would_make_a_file_is_refused_by_name(tmp_path: Path) -> None:
    bomb = tmp_path / "made"
    with pytest.raises(CheckpointError, match=r"bomb\.pt holds an object of \w+\.open"):
        saved(tmp_path / "bomb.pt", {"model": Bomb(bomb)})
    assert not bomb.exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "torch.hub.load"]
    + [
        "operator.attrgetter",
        "functools.partial",
        "megatron.core.diagnostics.fault_injection.fault_point",
    ],
)
def test_names_that_are_not_known_are_not_even_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    pickled = f"c{module}\n{attribute}\n.".encode()
    with pytest.raises(CheckpointError, match=f"an object of {name}"):
        unpickle(pickled, "f.pt")


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("_codecs\nencode", b"(cbuiltins\nset\n)}Nt"),  # of a partial: it calls set from now on
        ("torch\nSize", b"(N}S'__defaults__'\nI5\n\x85st"),  # of a function
    ],
)
def test_what_a_pickle_does_to_a_function_ends_with_it(name: str, state: bytes) -> None:
    unpickle(f"c{name}\n".encode() + state + b"b.", "f.pt")
    assert unpickle(b"c_codecs\nencode\n(S'a'\nS'latin1'\ntR.", "g.pt") == b"a"
    assert unpickle(b"ctorch\nSize\n)R.", "g.pt") == ()


def test_tensors_arrays_and_plain_values_come_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "view": base[1:3, ::2],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
        "array": np.arange(5, dtype=np.uint32),
        "scalar": np.float64(2.5),
        "random": random.Random(1).getstate(),
        "dtype": torch.int64,
        "size": torch.Size([2, 3]),
        "args": argparse.Namespace(lr=1e-3, path=Path("/a/b")),
    }
    loaded = saved(tmp_path / "f.pt", value)
    for name in ("view", "half", "parameter", "empty"):
        assert torch.equal(loaded[name].read(), value[name].detach()), name
    assert np.array_equal(loaded["array"], value["array"])
    assert loaded["scalar"] == 2.5
    assert loaded["random"] == value["random"]
    assert loaded["dtype"] is torch.int64
    assert loaded["size"] == (2, 3)
    assert vars(loaded["args"])["lr"] == 1e-3


def test_arrays_are_written_by_names_of_numpy_that_all_its_versions_have(tmp_path: Path) -> None:
    array = np.arange(5, dtype=np.uint32)
    arguments = argparse.Namespace(lr=1e-3)
    save_archive(tmp_path / "f.pt", {"array": array, "args": arguments})
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        found = [argument for code, argument, _ in pickletools.genops(archive.read(name))]
    assert "numpy.core.multiarray _reconstruct" in found
    assert not any("numpy._core" in str(argument) for argument in found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy 2, at an old name
        loaded = torch.load(tmp_path / "f.pt", weights_only=False)
    assert np.array_equal(loaded["array"], array)
    assert loaded["args"] == arguments


def test_enums_of_megatron_become_records() -> None:
    pickled = b"cmegatron.core.transformer.enums\nAttnBackend\n(I1\ntR."
    assert str(unpickle(pickled, "f.pt")) == "AttnBackend(1)"


def test_boxes_of_a_stored_tensor(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6).t()
    array = saved(tmp_path / "f.pt", whole)
    assert torch.equal(array[1:4, 2:3].read(), whole[1:4, 2:3])
    assert torch.equal(array[2].read(), whole[2])
    flat = saved(tmp_path / "g.pt", torch.arange(24.0))
    assert torch.equal(flat.flat(5, (2, 3)).read(), torch.arange(5.0, 11.0).view(2, 3))


def test_every_cut_and_every_flipped_byte_of_the_data_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"a": torch.arange(100.0)}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointDamaged, match=r"f\.pt"):
            load_archive(MappedFile(path))
    at = whole.index(torch.arange(100.0).numpy().tobytes())
    for byte in (0, 200, 399):
        path.write_bytes(whole[: at + byte] + b"\xff" + whole[at + byte + 1 :])
        array = load_archive(MappedFile(path))["a"]
        with pytest.raises(CheckpointDamaged, match="does not fit its checksum"):
            array.read()


def test_no_flipped_bit_anywhere_is_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"a": torch.arange(100.0), "args": argparse.Namespace(lr=1)}, path)
    whole = path.read_bytes()
    source = random.Random(3)
    for _ in range(300):
        at = source.randrange(len(whole))
        flipped = bytes([whole[at] ^ 1 << source.randrange(8)])
        path.write_bytes(whole[:at] + flipped + whole[at + 1 :])
        try:
            loaded = load_archive(MappedFile(path))
            loaded["a"].read()
        except CheckpointError:
            continue
        assert set(loaded) == {"a", "args"}
