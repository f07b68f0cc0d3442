"""Turn texts and their images into token files with modes.

    python tools/preprocess_mmdata.py --input captions.jsonl --input-image images/ \\
        --output-prefix coco --pad-length 64 --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model m.model

Line n of ``--input`` is a JSON object with the key text; ``--input-image`` is a directory, whose
files in the order of their names belong to the lines, or a file that lists one path per line.
Document n of ``{output-prefix}_mm.bin/.idx`` has two sequences of int32: the token ids of the text
(mode 0), and the bytes of the image file as int32 after the number of padding bytes (mode 1).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not
if __name__ == "__main__":  # no threads of numpy beside the workers
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import get_bin_path, get_idx_path
from megatron.training.arguments.tokenizer_flags import _add_tokenizer_args
from megatron.training.preprocess.cli import run_tool, tokenizer_of
from megatron.training.preprocess.encode import Progress
from megatron.training.process.user_code import parse_tool_args
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.fingerprint import Fingerprint, check_eod

_TEXT_MODE = 0
_IMAGE_MODE = 1
_PAIRS_PER_WORKER = 16  # in memory at a time
_NUMBER = np.dtype("<i4")


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("input data")
    group.add_argument("--input", required=True, help="JSON lines with the key text")
    group.add_argument(
        "--input-image", required=True, help="directory of images, or a file that lists them"
    )
    unused = "without effect, as in Megatron-LM: a text is one sequence"
    group.add_argument("--split-sentences", action="store_true", help=unused)
    group.add_argument("--keep-newlines", action="store_true", help=unused)
    _add_tokenizer_args(parser)
    group = parser.add_argument_group("tokens")
    group.add_argument("--lang", default="english", help=unused)
    group.add_argument(
        "--pad-length",
        type=int,
        required=True,
        help="tokens of each text with --append-eod: longer ones are cut, EOD fills shorter ones",
    )
    group.add_argument(
        "--append-eod", action="store_true", help="end texts with EOD, up to --pad-length tokens"
    )
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="path of the files, without _mm.bin")
    group = parser.add_argument_group("runtime")
    group.add_argument("--workers", type=int, default=1, help="threads that read and encode")
    group.add_argument("--log-interval", type=int, default=100, help="pairs between lines")
    return parser


def write_pairs(args: argparse.Namespace, tokenizer: MegatronTokenizer) -> str:
    """Write all pairs of text and image; return the prefix of the files."""
    for flag, value in (("--pad-length", args.pad_length), ("--workers", args.workers)):
        if value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1")
    eod = check_eod(tokenizer, "--append-eod") if args.append_eod else None
    prefix = f"{args.output_prefix}_mm"
    encode = partial(_encoded, args.input, tokenizer, args.pad_length, eod)
    builder = IndexedDatasetBuilder(get_bin_path(prefix), _NUMBER, multimodal=True)
    progress = Progress(os.path.getsize(args.input), args.log_interval)
    pairs = _pairs(args.input, image_paths(args.input_image))
    with ThreadPoolExecutor(args.workers) as pool:
        while batch := list(itertools.islice(pairs, _PAIRS_PER_WORKER * args.workers)):
            for (_, line, _), (ids, image) in zip(batch, pool.map(encode, batch), strict=True):
                builder.add_item(ids, _TEXT_MODE)
                builder.add_item(image, _IMAGE_MODE)
                builder.end_document()
                progress.add(1, len(line), len(line))
    builder.finalize(get_idx_path(prefix))
    Fingerprint.of(tokenizer).write(prefix)
    progress.print()
    return prefix


def image_paths(source: str) -> list[str]:
    """Return the files of a directory by name, or the paths that a file lists.

    Listed paths are relative to the list.  Raises DataError if there are none.
    """
    if os.path.isdir(source):
        paths = sorted(entry.path for entry in os.scandir(source) if entry.is_file())
    else:
        try:
            lines = Path(source).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise DataError(
                f"--input-image {source}: {error}; give a directory of images, or a text file "
                "that lists them"
            ) from error
        paths = [os.path.join(os.path.dirname(source), line) for line in lines if line]
    if not paths:
        raise DataError(f"--input-image {source} names no image: give one for each line of --input")
    return paths


def _pairs(text_path: str, images: Sequence[str]) -> Iterator[tuple[int, bytes, str]]:
    """Yield (line number, line, image path); raise DataError if there are not equally many."""
    number = 0
    with open(text_path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if number > len(images):
                raise DataError(
                    f"{text_path} has more lines than --input-image names images "
                    f"({len(images)}): the two belong together line by line"
                )
            yield number, line, images[number - 1]
    if number < len(images):
        raise DataError(
            f"{text_path} has {number} lines, --input-image names {len(images)} images: the two "
            "belong together line by line"
        )


def _encoded(
    text_path: str,
    tokenizer: MegatronTokenizer,
    pad_length: int,
    eod: int | None,
    pair: tuple[int, bytes, str],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the two sequences of a document; raise DataError for a line without text."""
    number, line, image_path = pair
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{text_path}, line {number}: no JSON ({error})") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{text_path}, line {number}: it needs the key text with a text")
    ids = tokenizer.tokenize(text)
    if ids and eod is not None:
        ids = ids[:pad_length]
        ids = ids + [eod] * (pad_length - len(ids))
    try:
        data = Path(image_path).read_bytes()
    except OSError as error:
        raise DataError(f"{image_path}: {error.strerror} (line {number} of {text_path})") from error
    num_padding = -len(data) % _NUMBER.itemsize
    values = np.frombuffer(data + bytes(num_padding), _NUMBER)
    return np.array(ids, _NUMBER), np.concatenate([np.array([num_padding], _NUMBER), values])


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse_tool_args(get_parser, argv)
    if args.split_sentences or args.keep_newlines:
        print(
            "warning: --split-sentences and --keep-newlines are without effect: a text is one "
            "sequence",
            file=sys.stderr,
        )
    print(f"wrote {write_pairs(args, tokenizer_of(args))}.bin and .idx", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main))
