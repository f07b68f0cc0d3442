"""Draw pictures with captions into tar shards, and write a tokenizer of their words.

    python examples/multimodal/quickstart/draw_samples.py FOLDER

FOLDER gets train.tar and valid.tar (pairs of NNNNNN.png and NNNNNN.json) and tokenizer/.  The
pictures of valid.tar have random colors, places and sizes of their own.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIDE = 48  # of a picture in pixels
COLORS = {"red": 0, "yellow": 55, "green": 110, "blue": 225, "pink": 310}  # hue in degrees
SHAPES = ("circle", "square", "triangle", "ring")
DIGITS = "0123456789"
QUESTION = "What is in the picture?"
NUM_TRAIN = 6000
NUM_VALID = 200


def draw(random: np.random.Generator) -> tuple[Image.Image, str]:
    """Return a picture of a shape and a digit, and its caption."""
    color, shape, digit = (random.choice(list(x)) for x in (COLORS, SHAPES, DIGITS))
    grey = int(random.integers(0, 60))
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    pen = ImageDraw.Draw(image)
    hue = COLORS[color] + int(random.integers(-8, 9))
    fill = f"hsl({hue % 360}, {random.integers(80, 101)}%, {random.integers(50, 61)}%)"
    size = int(random.integers(18, 23))
    left = int(random.integers(1, 5))
    top = int(random.integers(2, SIDE - size - 2))
    box = (left, top, left + size, top + size)
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    elif shape == "ring":
        pen.ellipse(box, outline=fill, width=5)
    else:
        pen.polygon([(left + size // 2, top), (left, top + size), box[2:]], fill=fill)
    font = ImageFont.load_default(size=int(random.integers(24, 29)))
    at = (int(random.integers(26, 30)), int(random.integers(4, 16)))
    pen.text(at, str(digit), fill="white", font=font)
    return image, f"a {color} {shape} and the digit {digit}"


def write_shard(path: Path, count: int, seed: int) -> None:
    """Write ``count`` samples in the layout of webdataset."""
    random = np.random.default_rng(seed)
    with tarfile.open(path, "w") as shard:
        for number in range(count):
            image, caption = draw(random)
            png = io.BytesIO()
            image.save(png, "PNG")
            turns = [
                {"from": "human", "value": f"<image>\n{QUESTION}"},
                {"from": "gpt", "value": caption},
            ]
            record = json.dumps({"conversations": turns}).encode()
            for suffix, content in (("png", png.getvalue()), ("json", record)):
                entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                entry.size = len(content)
                shard.addfile(entry, io.BytesIO(content))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the words of the captions and of the prompt format."""
    words = ["a", "and", "the", "digit", *COLORS, *SHAPES, *DIGITS, "user", "assistant", "system"]
    words += ["What", "is", "in", "picture", "?", "Answer", "questions", ".", "\n"]
    special = ["<unk>", "<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed"),
         pre_tokenizers.Punctuation()]
    )  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        eos_token="<|im_end|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
    ).save_pretrained(folder)


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write to")
    folder: Path = parser.parse_args().folder
    write_shard(folder / "train.tar", NUM_TRAIN, seed=1)
    write_shard(folder / "valid.tar", NUM_VALID, seed=2)
    write_tokenizer(folder / "tokenizer")
    print(f"{NUM_TRAIN} pictures to train on, {NUM_VALID} others to look at")


if __name__ == "__main__":
    main()
