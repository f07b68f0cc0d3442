"""Let a trained model say what is in pictures that it has not seen.

    python examples/multimodal/quickstart/look.py CHECKPOINTS VALID.TAR OUT.PNG [LEAST_ACCURACY]

Prints the accuracy beside chance, and writes a table of pictures with answers.  Ends with status 1
if the share of completely right answers is below LEAST_ACCURACY.
"""

from __future__ import annotations

import argparse
import io
import json
import sys

from draw_samples import COLORS, DIGITS, QUESTION, SHAPES, SIDE
from PIL import Image, ImageDraw

from megatron.core.datasets.tar_shards import TarShards
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM, PromptWithImages

COLUMNS = 4
ROWS = 3
SCALE = 3
CAPTION = 34
CHANCE = {"color": 1 / len(COLORS), "shape": 1 / len(SHAPES), "digit": 1 / len(DIGITS)}
PLACES = {"color": 1, "shape": 2, "digit": 6}  # of the words of a caption


def main() -> None:
    """Ask about each picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", help="checkpoints of the run")
    parser.add_argument("shard", help="tar file of pictures with captions")
    parser.add_argument("table", help="PNG file to write")
    parser.add_argument("least", type=float, nargs="?", default=0.0, help="least accuracy")
    args = parser.parse_args()
    llm = LLM.load(args.checkpoints)
    pictures = []
    captions = []
    for sample in TarShards(args.shard):
        pictures.append(sample.images[0])
        assert sample.json is not None
        captions.append(json.loads(sample.json)["conversations"][1]["value"])
    ask = [{"role": "user", "content": f"<image>\n{QUESTION}"}]
    params = SamplingParams(num_tokens_to_generate=12, top_k=1)
    prompts = [PromptWithImages(ask, [picture]) for picture in pictures]
    said = [answer.text.strip() for answer in llm.generate(prompts, params)]
    right = [a == b for a, b in zip(said, captions, strict=True)]
    print(f"{len(said)} held-out pictures            right   by chance")
    for name, place in PLACES.items():
        count = sum(word(a, place) == word(b, place) for a, b in zip(said, captions, strict=True))
        print(f"  {name:28} {count / len(said):8.1%} {CHANCE[name]:10.1%}")
    by_chance = CHANCE["color"] * CHANCE["shape"] * CHANCE["digit"]
    print(f"  {'the complete answer':28} {sum(right) / len(said):8.1%} {by_chance:10.1%}")
    draw_table(args.table, pictures, said, right)
    print(f"pictures with answers: {args.table}")
    if sum(right) < args.least * len(said):
        sys.exit(
            f"fewer than {args.least:.0%} of the answers are right: the model has not learned it"
        )


def word(text: str, place: int) -> str:
    """Return a word of a caption, "" if it is shorter."""
    words = text.split()
    return words[place] if place < len(words) else ""


def draw_table(path: str, pictures: list[bytes], said: list[str], right: list[bool]) -> None:
    """Write the first pictures with what was said of them, wrong answers in red."""
    width = 2 * SIDE * SCALE
    height = SIDE * SCALE + CAPTION
    sheet = Image.new("RGB", (COLUMNS * width, ROWS * height), "white")
    pen = ImageDraw.Draw(sheet)
    for i in range(min(COLUMNS * ROWS, len(pictures))):
        x = i % COLUMNS * width
        y = i // COLUMNS * height
        picture = Image.open(io.BytesIO(pictures[i])).resize((SIDE * SCALE, SIDE * SCALE))
        sheet.paste(picture, (x + width // 4, y))
        color = "black" if right[i] else "red"
        pen.text((x + width // 2, y + height - CAPTION // 2), said[i], fill=color, anchor="mm")
    sheet.save(path)


if __name__ == "__main__":
    main()
