"""The parsers of files that are no checkpoints: data, Hugging Face folders, configuration."""

from __future__ import annotations

import base64
import json
import random
import shutil
import struct
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_format import HEADER, get_crc_path
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.optional import require
from megatron.training.arguments.config_file import read_config_file
from megatron.training.conversion import hf_folder
from megatron.training.data.loaders import _lists_per_split
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.fingerprint import read_fingerprint, sidecar_path
from tests.support.file_fuzz.mutations import INTEGERS, change_bytes, change_json, replace_file
from tests.support.file_fuzz.targets import Change, Content, Target
from tests.support.tokenizer_files import DATA, SPM_MODEL, write_bpe
from tools.dev.lib.recipe_file import load as load_recipe
from tools.dev.run_recipe import words_of
from tools.verify_data import main as verify_data

GOLDEN = DATA.parent


def _change_text(path: Path, rng: random.Random, *, is_json: bool = True) -> str:
    kind = rng.random()
    if kind < 0.1:
        return replace_file(path, rng)
    if kind < 0.5 or not is_json:
        path.write_bytes(change_bytes(path.read_bytes(), rng))
        return "bytes"
    path.write_bytes(change_json(path.read_bytes(), rng))
    return "values"


# -- .bin and .idx --------------------------------------------------------------------------


def _make_data(root: Path) -> None:
    for end in (".bin", ".idx"):
        shutil.copy(DATA / f"text_text_document{end}", root / f"data{end}")
    verify_data(["--write", str(root / "data")])


def _read_data(root: Path) -> Content:
    dataset = IndexedDataset(str(root / "data"), verify_data=True)
    tokens = [dataset[i].tolist() for i in range(len(dataset))]
    return {"tokens": tokens, "documents": dataset.document_indices.tolist()}


def _change_data(root: Path, rng: random.Random) -> Change:
    """The index, its numbers above all; half of the time without checksums beside it."""
    has_checksums = rng.random() < 0.5
    if not has_checksums:
        Path(get_crc_path(str(root / "data"))).unlink()
    elif rng.random() < 0.2:
        path = root / "data.crc"
        path.write_bytes(change_bytes(path.read_bytes(), rng))
        return Change("checksums: bytes", "none")
    path, strict = root / "data.idx", "all" if has_checksums else "none"
    if rng.random() < 0.1:
        return Change(f"index: {replace_file(path, rng)}", strict)
    data = bytearray(path.read_bytes())
    if rng.random() < 0.4:
        path.write_bytes(change_bytes(bytes(data), rng))
        return Change("index: bytes", strict)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.choice((9, 18, 26, *(rng.randrange(HEADER.size, len(data) - 8) for _ in range(6))))
        at = at if at < HEADER.size else HEADER.size + (at - HEADER.size) // 4 * 4
        value = rng.choice(INTEGERS) + rng.choice((-1, 0, 1))
        size = rng.choice((4, 8))
        struct.pack_into("<Q" if size == 8 else "<I", data, at, value % (1 << (8 * size)))
    path.write_bytes(data)
    return Change("index: numbers", strict)


# -- Hugging Face ---------------------------------------------------------------------------

_CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "rope_theta": 10000.0,
}


def _make_hf(root: Path) -> None:
    hf_folder.write_config(root, _CONFIG)
    sizes = {"embed": (8, 4), "norm": (4,), "half": (2, 4)}
    hf_folder.write_weights(
        root,
        [LazyTensor(n, torch.float32, s, partial(torch.full, s, 1.5)) for n, s in sizes.items()],
    )
    index = {"weight_map": dict.fromkeys(sizes, "model.safetensors")}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def _read_hf(root: Path) -> Content:
    config = hf_folder.read_config(root)
    return {
        "config": config,
        "tensors": {n: t.make() for n, t in hf_folder.read_weights(root).items()},
    }


def _change_hf(root: Path, rng: random.Random) -> Change:
    path = rng.choice(sorted(root.iterdir()))
    if path.suffix == ".safetensors" and rng.random() < 0.6:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = change_json(data[8 : 8 + length], rng)
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        return Change("header of the weights: values", "none")
    what = _change_text(path, rng, is_json=path.suffix == ".json")
    return Change(f"{path.name}: {what}", "none")


# -- text -----------------------------------------------------------------------------------


def _make_yaml(root: Path) -> None:
    shutil.copy(GOLDEN / "gpt_config.yaml", root / "run.yaml")


def _change_yaml(root: Path, rng: random.Random) -> Change:
    yaml = require("yaml", "the fuzzer")
    (path,) = root.iterdir()
    kind = rng.random()
    if kind < 0.6:
        return Change(_change_text(path, rng, is_json=False), "none")
    text = path.read_text()
    if kind < 0.75:
        places = [i for i, letter in enumerate(text) if letter in " \n:"]
        at = rng.choice(places)
        words = ("&a [*a]", "!!python/object:os.system x", "[" * 10**5, "{a: " * 10**5, "<<: *x",
                 "? ", "- ", "\t", "2001-99-99", "0o9", "1" * 5000, "!!int x", "${NOT_SET}", "%",
                 "!!binary =", "!!timestamp x", "&a [1,1]\nb: &b [*a,*a]")  # fmt: skip
        path.write_text(f"{text[: at + 1]}{rng.choice(words)}{text[at + 1 :]}")
        return Change("words", "none")
    value = yaml.load(text, Loader=yaml.BaseLoader)
    path.write_bytes(change_json(json.dumps(value).encode(), rng))
    return Change("values", "none")


def _make_recipe(root: Path) -> None:
    shutil.copy(GOLDEN / "recipes" / "moe_pipeline.yaml", root / "recipe.yaml")


def _read_recipe(root: Path) -> Content:
    recipe = load_recipe(root / "recipe.yaml")
    names = (
        "DATA_PATH",
        "DATA_CACHE_PATH",
        "DATA_BLEND",
        "CHECKPOINT_SAVE_PATH",
        "CHECKPOINT_LOAD_PATH",
    )
    env = dict.fromkeys((*names, "TENSORBOARD_PATH", "OUTPUT_PATH"), "/x")
    try:
        return {"words": words_of(recipe.args, env | recipe.env)}
    except ConfigError as error:  # there is one recipe: its messages call it "the recipe"
        raise ConfigError(f"{root / 'recipe.yaml'}: {error}") from None


def _make_split(root: Path) -> None:
    lists = {"train": ["1", "a"], "valid": ["b"], "test": None}
    (root / "split.json").write_text(json.dumps(lists))


def _make_fingerprint(root: Path) -> None:
    values = {"tokenizer": "X", "vocab_size": 7, "sha256": "ab", "eod": 3}
    Path(sidecar_path(str(root / "data"))).write_text(json.dumps(values))


def _make_ranks(root: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    (root / "vocab.json").write_text(json.dumps(entries))


def _read_tokenizer(root: Path, kind: str, file: str, **options: Any) -> Content:
    path = root / file
    tokenizer = create_tokenizer(
        TokenizerSpec(tokenizer_type=kind, tokenizer_model=str(path), **options)
    )
    return {"ids": list(tokenizer.tokenize("the thing"))}


def _change_one(root: Path, rng: random.Random, *, is_json: bool = True) -> Change:
    path = rng.choice(sorted(p for p in root.iterdir() if p.suffix != ".txt"))
    return Change(f"{path.name}: {_change_text(path, rng, is_json=is_json)}", "none")


OTHERS = [
    Target("data", _make_data, _read_data, _change_data),
    Target("hugging face", _make_hf, _read_hf, _change_hf),
    Target(
        "yaml",
        _make_yaml,
        lambda root: read_config_file(str(root / "run.yaml"), "--config"),
        _change_yaml,
    ),
    Target("recipe", _make_recipe, _read_recipe, _change_yaml),
    Target(
        "per-split",
        _make_split,
        lambda root: {"lists": _lists_per_split(str(root / "split.json"))},
        _change_one,
    ),
    Target(
        "fingerprint",
        _make_fingerprint,
        lambda root: {"found": repr(read_fingerprint(str(root / "data")))},
        _change_one,
    ),
    Target(
        "tiktoken",
        _make_ranks,
        partial(
            _read_tokenizer,
            kind="TikTokenizer",
            file="vocab.json",
            vocab_size=268,
            tiktoken_num_special_tokens=10,
            tiktoken_pattern="v2",
        ),
        _change_one,
    ),
    Target(
        "sentencepiece",
        lambda root: shutil.copy(SPM_MODEL, root / "spm.model"),
        partial(_read_tokenizer, kind="GPTSentencePieceTokenizer", file="spm.model"),
        partial(_change_one, is_json=False),
    ),
    Target(
        "tokenizer.json",
        write_bpe,
        partial(_read_tokenizer, kind="HuggingFaceTokenizer", file="tokenizer.json"),
        _change_one,
    ),
]
