"""Hugging Face folders that are not what they should be: one error each, which names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.conversion import hf_folder
from megatron.training.conversion.convert import ConversionRequest, convert
from megatron.training.conversion.families import FAMILIES
from megatron.training.conversion.hf import export_model
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.tensors import tensors_of

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
WEIGHTS, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
Q, K = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in one file."""
    folder = tmp_path_factory.mktemp("llama")
    family = FAMILIES["llama"]
    shape = family.shape(CONFIG)
    ours = {}
    for name, size in tensors_of(shape).items():
        ours[name] = LazyTensor(name, torch.float32, size, partial(torch.ones, size))
    hf_folder.write_config(folder, CONFIG)
    hf_folder.write_weights(folder, export_model(shape, ours, family))
    return folder


def text(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def config(**changes: Any) -> Damage:
    return text("config.json", json.dumps(CONFIG | changes))


def index(weight_map: Any) -> Damage:
    return text(INDEX, json.dumps({"weight_map": weight_map}))


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the header of the weights, and leave the data."""

    def damage(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        changed = change(entries)
        encoded = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
        whole = len(encoded).to_bytes(8, "little") + encoded + data[8 + length :]
        (folder / WEIGHTS).write_bytes(whole)

    return damage


def entry(name: str, **fields: Any) -> Damage:
    return header(lambda entries: entries[name].update(fields))


def overlap(entries: dict[str, Any]) -> None:
    low, high = entries[Q]["data_offsets"]
    entries[Q]["data_offsets"] = [low - 4, high - 4]


def negative(entries: dict[str, Any]) -> None:
    low, high = entries[Q]["data_offsets"]
    entries[Q]["data_offsets"] = [low - high, 0]


def twice(entries: dict[str, Any]) -> bytes:
    plain = json.dumps(entries)
    return plain.replace(json.dumps(K), json.dumps(Q), 1).encode()


def tensor(name: str, *shape: int) -> Damage:
    """Write the tensors again, one of them with another shape; without a shape leave it out."""

    def damage(folder: Path) -> None:
        held = hf_folder.read_weights(folder)
        held.pop(name, None)
        if shape:
            held[name] = LazyTensor(name, torch.float32, shape, partial(torch.ones, shape))
        values = as_lazy({name: each.make().clone() for name, each in held.items()})
        hf_folder.write_weights(folder, list(values.values()))

    return damage


def swapped_heads(folder: Path) -> None:
    """Queries and keys trade rows, so that their sum is right."""
    tensor(Q, 8, 16)(folder)
    tensor(K, 16, 16)(folder)


def pickled(value: Any) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        torch.save(value, folder / BIN)

    return damage


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


def is_a_folder(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def cut(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / name, size)


DEEP = "[" * 100_000
DAMAGES: dict[str, tuple[Damage, str]] = {
    "config empty": (text("config.json", ""), "config.json is no JSON"),
    "config cut": (cut("config.json", 30), "config.json is no JSON"),
    "config no text": (text("config.json", b"\xff\xfe{}"), "config.json is no JSON"),
    "config a list": (text("config.json", "[1]"), "config.json is a list, not a JSON object"),
    "config a number": (text("config.json", "3"), "config.json is a int, not a JSON object"),
    "config deep": (text("config.json", DEEP), "config.json is no JSON: maximum recursion"),
    "config deep object": (
        text("config.json", '{"a":' * 100_000),
        "config.json is no JSON: maximum recursion",
    ),
    "config a folder": (is_a_folder("config.json"), "config.json cannot be read: Is a directory"),
    "config with no model_type": (text("config.json", "{}"), "config.json has model_type None"),
    "model_type unknown": (config(model_type="nope"), "config.json has model_type nope"),
    "model_type a list": (config(model_type=["llama"]), r"config.json has model_type \['llama'\]"),
    "hidden_size text": (config(hidden_size="16"), "config.json has hidden_size '16': an integer"),
    "hidden_size negative": (config(hidden_size=-16), "config.json has hidden_size -16: an"),
    "hidden_size 0": (config(hidden_size=0), "config.json has hidden_size 0: an integer above 0"),
    "hidden_size huge": (config(hidden_size=2**62), "config.json has hidden_size 4611686018427"),
    "hidden_size NaN": (config(hidden_size=float("nan")), "config.json has hidden_size nan"),
    "hidden_size a float": (config(hidden_size=16.0), "config.json has hidden_size 16.0"),
    "hidden_size true": (config(hidden_size=True), "config.json has hidden_size True"),
    "hidden_size null": (config(hidden_size=None), "config.json has no hidden_size"),
    "layers huge": (config(num_hidden_layers=2**62), "config.json has num_hidden_layers 4611"),
    "layers many": (config(num_hidden_layers=9999), "config.json asks for 9999 layers, and the"),
    "heads 0": (config(num_attention_heads=0), "config.json has num_attention_heads 0"),
    "heads not by groups": (config(num_attention_heads=3), "num_attention_heads 3, which 2 groups"),
    "width not by heads": (config(num_attention_heads=6), "asks for"),
    "vocabulary huge": (config(vocab_size=2**31 - 1), r"config.json asks for \[2147483647, 16\]"),
    "epsilon NaN": (config(rms_norm_eps=float("nan")), "config.json has rms_norm_eps nan"),
    "epsilon infinite": (config(rms_norm_eps=float("inf")), "config.json has rms_norm_eps inf"),
    "rope a list": (config(rope_scaling=[1]), r"config.json has rope_scaling \[1\]: an object"),
    "rope without a factor": (
        config(rope_scaling={"rope_type": "linear"}),
        "config.json has no factor",
    ),
    "rope factor text": (
        config(rope_scaling={"rope_type": "linear", "factor": "x"}),
        "config.json has factor 'x': a number above 0",
    ),
    "tied a word": (config(tie_word_embeddings="no"), "config.json has tie_word_embeddings 'no'"),
    "quantized by a list": (config(quantization_config=[]), "config.json has quantization_config"),
    "quantized in blocks of text": (
        config(quantization_config={"quant_method": "fp8", "weight_block_size": "xy"}),
        "config.json has weight_block_size xy",
    ),
    "index cut": (text(INDEX, '{"weight_map": {"a"'), "index.json is no JSON"),
    "index empty": (text(INDEX, ""), "index.json is no JSON"),
    "index a list": (text(INDEX, "[]"), "index.json is a list, not a JSON object"),
    "index deep": (text(INDEX, DEEP), "index.json is no JSON: maximum recursion"),
    "index a folder": (is_a_folder(INDEX), "index.json cannot be read: Is a directory"),
    "index without a map": (text(INDEX, "{}"), "index.json has no weight_map"),
    "index with a list": (index([WEIGHTS]), "index.json has no weight_map"),
    "index with an empty map": (index({}), "index.json has no weight_map"),
    "index with a number": (index({Q: 1}), "index.json names the file 1, which is not a name"),
    "index with a list of files": (index({Q: [WEIGHTS]}), r"index.json names the file \['model"),
    "index leaves the folder": (
        index({Q: "../../../../etc/passwd"}),
        r"index.json names the file '../../../../etc/passwd', which is not a name directly inside",
    ),
    "index with an absolute path": (index({Q: "/etc/passwd"}), "which is not a name directly"),
    "index with no name": (index({Q: ""}), "index.json names the file '', which is not a name"),
    "index of a missing file": (index({Q: "gone.safetensors"}), "gone.safetensors is missing"),
    "index of a part": (index({Q: WEIGHTS}), "index.json does not fit its files"),
    "index of a folder": (index({Q: "huggingface"}), "huggingface is missing"),
    "weights missing": (lambda f: (f / WEIGHTS).unlink(), "has neither model.safetensors nor"),
    "weights empty": (text(WEIGHTS, ""), "model.safetensors is no safetensors file: its header"),
    "weights of 4 bytes": (text(WEIGHTS, b"\1\0\0\0"), "model.safetensors is no safetensors file"),
    "weights a folder": (is_a_folder(WEIGHTS), "model.safetensors cannot be read: Is a directory"),
    "weights cut": (cut(WEIGHTS, 3000), "model.safetensors is damaged: it has 3000 B"),
    "weights longer": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes() + b"more"),
        "model.safetensors is damaged: it has",
    ),
    "header beyond the file": (
        text(WEIGHTS, (10_000).to_bytes(8, "little") + b"{}"),
        "model.safetensors is no safetensors file: its header would be 10000 B",
    ),
    "header enormous": (text(WEIGHTS, b"\xff" * 64), "its header would be 18446744073709551615 B"),
    "header no JSON": (header(lambda e: b"{abc"), "model.safetensors is no safetensors file: its"),
    "header a list": (header(lambda e: b"[1]"), "its header is a list, not a JSON object"),
    "header deep": (header(lambda e: DEEP.encode()), "its header is no JSON: maximum recursion"),
    "a name twice": (header(twice), "its header is no JSON: it has .*q_proj.weight twice"),
    "entry a list": (header(lambda e: e.update({Q: [1]})), "its header does not describe"),
    "entry empty": (header(lambda e: e.update({Q: {}})), "its header does not describe"),
    "dtype unknown": (entry(Q, dtype="F128"), "q_proj.weight has dtype F128, which torch lacks"),
    "dtype a number": (entry(Q, dtype=1), "its header does not describe"),
    "dtype of other bytes": (entry(Q, dtype="F64"), r"has 1024 B for F64 \[16, 16\]"),
    "shape text": (entry(Q, shape="16"), "its header does not describe"),
    "shape negative": (entry(Q, shape=[-16, -16]), "its header does not describe"),
    "shape of floats": (entry(Q, shape=[16.0, 16.0]), "its header does not describe"),
    "shape huge": (entry(Q, shape=[2**62, 2**62]), "has 1024 B for F32"),
    "shape huge and empty": (
        header(lambda e: e.update(a={"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]})),
        "a has shape .4611686018427387904, 0., which is without elements",
    ),
    "shape of another size": (entry(Q, shape=[16, 15]), r"has 1024 B for F32 \[16, 15\]"),
    "shape turned": (entry(K, shape=[16, 8]), "asks for"),
    "shape flat": (entry(Q, shape=[256]), "asks for"),
    "shape of a scalar": (tensor("model.norm.weight", 1), r"asks for \[16\]"),
    "offsets one": (entry(Q, data_offsets=[0]), "model.safetensors is damaged"),
    "offsets text": (entry(Q, data_offsets="01"), "its header does not describe"),
    "offsets overlap": (header(overlap), "is damaged: .* begins at byte"),
    "offsets negative": (header(negative), "its header does not describe"),
    "offsets beyond the file": (
        entry(Q, data_offsets=[2**40, 2**40 + 1024]),
        "is damaged: .* begins at byte",
    ),
    "offsets backwards": (entry(Q, data_offsets=[1024, 0]), "has -1024 B"),
    "a hole": (header(lambda e: e.pop(Q)), "is damaged: .* begins at byte"),
    "a tensor missing": (tensor("model.norm.weight"), "the weights have no model.norm.weight"),
    "a tensor more": (tensor("more", 3), "1 tensors have no place in a Llama"),
    "a tensor of another width": (tensor("model.norm.weight", 15), r"asks for \[16\]"),
    "rows of another tensor": (swapped_heads, r"_proj.weight \[8, 16\].* asks for \[16, 16\]"),
    "bin of a list": (pickled([torch.ones(2)]), "pytorch_model.bin holds a list, not tensors"),
    "bin of a tensor": (pickled(torch.ones(2)), "pytorch_model.bin holds a Tensor, not tensors"),
    "bin of numbers": (pickled({Q: 1}), "pytorch_model.bin holds a int as"),
    "bin of nested tensors": (pickled({"a": {"b": torch.ones(2)}}), "holds a dict as 'a'"),
    "bin with numbers for names": (pickled({1: torch.ones(2)}), "holds a Tensor as 1"),
    "bin that expands": (pickled({Q: torch.ones(1).expand(2**40)}), "expanded, not plain"),
    "bin sparse": (pickled({Q: torch.ones(2, 2).to_sparse()}), "is sparse, quantized or expanded"),
    "bin that runs code": (pickled({Q: Bomb()}), "pytorch_model.bin holds more than tensors"),
    "bin empty": (
        lambda f: (f / WEIGHTS).rename(f / BIN).write_bytes(b""),
        "pytorch_model.bin holds more than tensors, or is damaged",
    ),
    "bin of text": (
        lambda f: (f / WEIGHTS).rename(f / BIN).write_bytes(b"hello, world"),
        "pytorch_model.bin holds more than tensors, or is damaged",
    ),
    "bin cut": (
        lambda f: (pickled({Q: torch.ones(64)})(f), os.truncate(f / BIN, 500)),
        "pytorch_model.bin holds more than tensors, or is damaged",
    ),
    "bin a folder": (
        lambda f: ((f / WEIGHTS).unlink(), (f / BIN).mkdir()),
        "pytorch_model.bin cannot be read: Is a directory",
    ),
}


def read(folder: Path, target: Path) -> None:
    convert(
        ConversionRequest(source=folder, target=target, format="safetensors_dist", verify=False),
        lambda line: None,
    )


def test_the_undamaged_folder_is_read(whole: Path, tmp_path: Path) -> None:
    read(whole, tmp_path / "ours")
    assert (tmp_path / "ours").is_dir()


@pytest.mark.parametrize("case", DAMAGES)
@pytest.mark.feature("Checkpoints: a malformed Hugging Face folder is refused by one error")
def test_a_malformed_folder_is_refused(
    case: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, sentence = DAMAGES[case]
    folder, run = tmp_path / "theirs", tmp_path / "run"
    shutil.copytree(whole, folder)
    run.mkdir()
    damage(folder)
    monkeypatch.chdir(run)
    with pytest.raises(CheckpointError, match=sentence):
        read(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert not list(run.iterdir())


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_file_that_changes_after_its_header_was_read_is_refused(
    whole: Path, tmp_path: Path, damage: Damage
) -> None:
    shutil.copy(whole / WEIGHTS, tmp_path)
    weights = hf_folder.read_safetensors(tmp_path / WEIGHTS)
    damage(tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} cannot be read: .*; get the folder"):
        weights[Q].make()


def test_files_that_are_links_are_read(whole: Path, tmp_path: Path) -> None:
    """The cache of the hub is made of them."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).symlink_to(path)
    names = hf_folder.read_weights(whole)
    text(INDEX, json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))(folder)
    read(folder, tmp_path / "ours")
