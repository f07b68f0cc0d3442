"""Write a caption for each image of a folder into a file of JSON lines.

    python tools/run_vlm_text_generation.py --load DIR --input-image-path FOLDER \
        --output-path captions.jsonl

The flags are those of Megatron-LM's tool; model and tokenizer come from the checkpoint.  A run that
has been ended continues: captions are appended to FILE.part, which becomes FILE after the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config.errors import ConfigError, DataError, MegatronError
from megatron.core.datasets.images import decode_image
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM, PromptWithImages
from megatron.inference.engine_flags import engine_options, generation_layout
from megatron.training.arguments.parser import parse_args
from megatron.training.process.exit_report import exit_code
from megatron.training.process.rank_print import is_rank0
from megatron.training.tokenizer.multimodal_tokenizer import IMAGE_TOKEN, MultimodalTokenizer

SUFFIXES = frozenset(".png .jpg .jpeg .webp .gif .bmp .tif .tiff .ppm .avif".split())

# Flags of all programs that this one reads; all others are those of a checkpoint's training run.
_READ = (
    "--load",
    "--ckpt-step",
    "--device",
    "--import-module",
    "--spec",
    "--cache-mla-latents",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--use-checkpoint-args",
    "--no-inference-prefix-cache",
    "--config",
    "--seed",
)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this tool to those of the engine and the model."""
    group = parser.add_argument_group("captions")
    group.add_argument(
        "--input-image-path", "--input-path", metavar="FOLDER", help="Folder with the images."
    )
    group.add_argument("--output-path", metavar="FILE", help="File of JSON lines to write.")
    group.add_argument(
        "--prompt",
        default="Describe the image in one sentence.",
        help="Question about each image; the image stands before it unless it has a tag <image>.",
    )
    group.add_argument(
        "--out-seq-length", type=int, default=128, help="Tokens of a caption at most."
    )
    group.add_argument("--temperature", type=float, default=1.0, help="0 is greedy.")
    group.add_argument("--top_k", type=int, default=0, help="0: no limit.")
    group.add_argument("--top_p", type=float, default=0.0, help="0: no limit.")
    group.add_argument(
        "--num-partitions",
        type=int,
        default=0,
        help="Divide the sorted images into so many parts, each for a run of its own; its number "
        "is added to the name of --output-path.",
    )
    group.add_argument("--partition-id", type=int, default=0, help="Part of this run, from 0.")
    group.add_argument(
        "--num-samples-per-partition", type=int, help="Images of a part; default: equal parts."
    )
    group.add_argument("--task", default="captioning", help="captioning only.")
    refused = parser.add_argument_group("refused")
    refused.add_argument("--gt-path", help="Refused: captions are not scored.")
    refused.add_argument("--config-path", help="Refused: give flags.")
    refused.add_argument(
        "--drop-vision-class-token", action="store_true", help="Refused: the checkpoint says it."
    )
    return parser


def main() -> None:
    """Caption the images that have no caption yet."""
    try:
        args = parse_args(add_flags)
        ConfigError.raise_for(problems_of(args))
        if is_rank0():
            warn_of_flags(sys.argv[1:])
        images = images_of(args)
        captions = Captions(output_of(args), args.prompt)
        waiting = [(i, image) for i, image in images if image.name not in captions.done]
        given = vars(args)
        llm = LLM.load(
            args.load,
            step=args.ckpt_step,
            device_kind=args.device,
            layout=generation_layout(args),
            options=engine_options(args),
            flags={name: given[name] for name in ("cache_mla_latents", "spec") if given[name]},
        )
        caption(llm, args, waiting, captions)
        llm.shut_down()
    except (MegatronError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def caption(
    llm: LLM, args: argparse.Namespace, images: Sequence[tuple[int, Path]], captions: Captions
) -> None:
    """Write the captions of ``images`` on rank 0.  Collective over all ranks."""
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        num_tokens_to_generate=args.out_seq_length,
        seed=args.seed,
    )
    text: Any = args.prompt if IMAGE_TOKEN in args.prompt else f"{IMAGE_TOKEN}\n{args.prompt}"
    if isinstance(llm.tokenizer, MultimodalTokenizer):
        text = [{"role": "user", "content": text}]
    if is_rank0():
        captions.open()
    asked: list[tuple[int, Path]] = []

    def prompts() -> Iterator[PromptWithImages]:
        for number, path in images:
            try:
                image = decode_image(path.read_bytes(), path.name)
            except DataError as error:
                captions.add(number, path.name, error=str(error))
                print(f"WARNING: {error}; no caption is written", flush=True)
                continue
            asked.append((number, path))
            yield PromptWithImages(text, [image])

    at_once = args.inference_max_batch_size
    for answer in llm.answers(prompts(), params, at_once=at_once):
        number, path = asked.pop(0)
        captions.add(number, path.name, caption=answer.text.strip())
    if is_rank0():
        captions.finish()


class Captions:
    """The file of captions.  ``done``: names of the images that it has."""

    def __init__(self, path: Path, prompt: str) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._prompt = prompt
        self._lines: list[str] = []
        self._num_failed = 0
        self.done: set[str] = set()
        source = self._part if self._part.exists() else path
        if source.exists():
            self._read(source)

    def _read(self, source: Path) -> None:
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if number == len(lines) and not line.endswith("\n"):
                break  # the run before was ended while it wrote this line
            try:
                found = json.loads(line)
                name = found["image"]
                prompt = found["prompt"]
                has_failed = "error" in found
            except (ValueError, TypeError, KeyError):
                raise DataError(
                    f"{source}, line {number} is no caption of this tool: name another "
                    "--output-path"
                ) from None
            if prompt != self._prompt:
                raise ConfigError(
                    f"--prompt {self._prompt!r}: {source} has captions for {prompt!r}: name "
                    "another --output-path"
                )
            if not has_failed:  # failed ones are read again
                self._lines.append(line)
                self.done.add(name)

    def open(self) -> None:
        """Begin to write: with the lines that are complete."""
        temporary = self._part.with_name(self._part.name + ".tmp")
        temporary.write_text("".join(self._lines), encoding="utf-8")
        os.replace(temporary, self._part)
        self._file = self._part.open("a", encoding="utf-8")

    def add(self, number: int, name: str, **values: str) -> None:
        """Append a caption, or an error."""
        record = {"sample_id": number, "image": name, "prompt": self._prompt, **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.done.add(name)
        self._num_failed += "error" in values

    def finish(self) -> None:
        """Give the file its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._path)
        count = len(self.done) - self._num_failed
        print(f"{self._path}: {count} captions, {self._num_failed} images without one", flush=True)


def warn_of_flags(words: Sequence[str]) -> None:
    """Print which flags of a training script have no effect."""
    own = add_flags(argparse.ArgumentParser())
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = {flag for action in own._actions for flag in action.option_strings}
    known |= {*_READ, "--yaml-cfg"}
    others = sorted(flag for flag in given - known if not flag.startswith("--inference-"))
    if others:
        print(
            f"WARNING: {', '.join(others)}: without effect, model and tokenizer are those of the "
            "checkpoint",
            flush=True,
        )


def problems_of(args: argparse.Namespace) -> list[str]:
    """Return what does not fit on the command line."""
    needed = {
        "--load": args.load,
        "--input-image-path": args.input_image_path,
        "--output-path": args.output_path,
    }
    found = [f"{flag} is missing" for flag, value in needed.items() if value is None]
    if args.task != "captioning":
        found.append(f"--task {args.task}: only captioning is supported; leave it out")
    if args.gt_path is not None:
        found.append("--gt-path: captions are not scored; leave it out")
    if args.config_path is not None:
        found.append("--config-path: give its values as flags")
    if args.drop_vision_class_token:
        found.append(
            "--drop-vision-class-token: the checkpoint says whether the encoder's class token is "
            "dropped; leave it out"
        )
    parts = max(args.num_partitions, 1)
    if args.num_partitions < 0 or not 0 <= args.partition_id < parts:
        found.append(
            f"--partition-id {args.partition_id}: give 0 to {parts - 1} (--num-partitions "
            f"{args.num_partitions})"
        )
    if args.num_samples_per_partition is not None and args.num_samples_per_partition < 1:
        found.append("--num-samples-per-partition: give 1 or more")
    return found


def images_of(args: argparse.Namespace) -> list[tuple[int, Path]]:
    """Return the images of this run's part, each with its number in the sorted folder."""
    folder = Path(args.input_image_path)
    if not folder.is_dir():
        raise ConfigError(f"--input-image-path {folder} is no directory: give one with images")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(
            f"--input-image-path {folder} has no image: give a folder of files with names in "
            + ", ".join(sorted(SUFFIXES))
        )
    parts = max(args.num_partitions, 1)
    size = args.num_samples_per_partition or -(-len(found) // parts)
    first = args.partition_id * size
    return list(enumerate(found))[first : first + size]


def output_of(args: argparse.Namespace) -> Path:
    """Return the file to write: NAME-2-of-8.jsonl for part 2 of 8."""
    path = Path(args.output_path)
    if args.num_partitions <= 1:
        return path
    return path.with_name(f"{path.stem}-{args.partition_id}-of-{args.num_partitions}{path.suffix}")


if __name__ == "__main__":
    main()
