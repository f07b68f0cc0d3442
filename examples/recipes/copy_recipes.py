"""Write the recipes with example data and tiny models into a folder.

    megatron-train recipes FOLDER     FOLDER/*.yaml, FOLDER/data, FOLDER/tiny, FOLDER/tiny-vl

The tiny models have random weights and a token for each byte: with `--load tiny` a recipe runs in a
minute on a laptop, and shows that data and settings are right before a GPU is used.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from megatron.core.optional import require

COMMAND = "megatron-train recipes"
HERE = Path(__file__).resolve().parent
PREPROCESS = HERE.parents[1] / "tools" / "preprocess_data.py"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TINY = {**TEXT, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
TINY_VL = {
    **TEXT,
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "image_token_id": 261,
    "video_token_id": 262,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "vision_config": {
        "model_type": "qwen2_vl",
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
NUM_FILES = 20  # of the standard library, for pretraining
NUM_PICTURES = 32


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    folder: Path = parser.parse_args().folder
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} has files: name a new folder")
    shutil.copytree(HERE / "data", folder / "data", ignore=shutil.ignore_patterns("__*"))
    for path in HERE.glob("*.yaml"):
        shutil.copy(path, folder)
    for name, config in (("tiny", TINY), ("tiny-vl", TINY_VL)):
        write_tokenizer(folder / name)
        write_model(folder / name, config)
    write_corpus(folder)
    write_pictures(folder / "data" / "images.tar")
    print(f"cd {folder}; megatron-train --config sft-lora.yaml --load tiny")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each byte, and a chat template."""
    library = require("tokenizers", COMMAND)
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = library.models.BPE({token: i for i, token in enumerate(alphabet)}, [])
    rules = library.Tokenizer(bytes_alone)
    rules.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = library.decoders.ByteLevel()
    rules.add_special_tokens([*SPECIAL])
    folder.mkdir(parents=True)
    rules.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and random weights."""
    torch.manual_seed(1)
    weights = {}
    shapes = [*text_shapes(config), *vision_shapes(config.get("vision_config"))]
    for name, shape in shapes:
        is_scale = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight"))
        weights[name] = (torch.ones(shape) if is_scale else torch.randn(shape) * 0.05).bfloat16()
    require("safetensors.torch", COMMAND).save_file(
        weights, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def text_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the weights of a language model."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    head = size // config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], size)
    yield "model.norm.weight", (size,)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (size,)
        yield f"{name}.post_attention_layernorm.weight", (size,)
        for part, rows in (("q", size), ("k", keys), ("v", keys), ("o", size)):
            yield f"{name}.self_attn.{part}_proj.weight", (rows, size)
        for part in ("gate", "up"):
            yield f"{name}.mlp.{part}_proj.weight", (inner, size)
        yield f"{name}.mlp.down_proj.weight", (size, inner)
        if config["model_type"] == "qwen3":
            yield f"{name}.self_attn.q_norm.weight", (head,)
            yield f"{name}.self_attn.k_norm.weight", (head,)
        else:
            for part, rows in (("q", size), ("k", keys), ("v", keys)):
                yield f"{name}.self_attn.{part}_proj.bias", (rows,)


def vision_shapes(config: dict[str, Any] | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the weights of the encoder and the projector of Qwen2-VL."""
    if config is None:
        return
    size = config["embed_dim"]
    inner = size * config["mlp_ratio"]
    merged = size * config["spatial_merge_size"] ** 2
    yield "visual.patch_embed.proj.weight", (size, 3, 2, config["patch_size"], config["patch_size"])
    parts = {"merger.ln_q": (size,), "merger.mlp.0": (merged, merged)}
    parts |= {"merger.mlp.2": (config["hidden_size"], merged)}
    for block in (f"blocks.{layer}" for layer in range(config["depth"])):
        parts |= {f"{block}.attn.qkv": (3 * size, size), f"{block}.attn.proj": (size, size)}
        parts |= {f"{block}.mlp.fc1": (inner, size), f"{block}.mlp.fc2": (size, inner)}
        parts |= {f"{block}.norm1": (size,), f"{block}.norm2": (size,)}
    for part, shape in parts.items():
        yield f"visual.{part}.weight", shape
        yield f"visual.{part}.bias", shape[:1]


def write_corpus(folder: Path) -> None:
    """Write token files of a part of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:NUM_FILES]
    corpus = folder / "data" / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f.read_text()}) + "\n" for f in files))
    command = [sys.executable, str(PREPROCESS), "--input", str(corpus), "--workers", "1"]
    command += ["--output-prefix", str(folder / "data" / "corpus"), "--append-eod"]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    subprocess.run([*command, str(folder / "tiny")], check=True, stdout=subprocess.DEVNULL)


def write_pictures(shard: Path) -> None:
    """Write pictures of one color and conversations about them, in the layout of webdataset."""
    colors = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200)}
    with tarfile.open(shard, "w") as tar:
        for number in range(NUM_PICTURES):
            name, color = list(colors.items())[number % len(colors)]
            turns = [
                {"from": "human", "value": "<|vision_start|><image><|vision_end|>\nWhich color?"},
                {"from": "gpt", "value": f"It is {name}."},
            ]
            picture = b"P6 56 56 255\n" + bytes(color) * 56**2
            for suffix, content in (
                ("ppm", picture),
                ("json", json.dumps({"conversations": turns}).encode()),
            ):
                entry = tarfile.TarInfo(f"{number:03}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    main()
