"""Look into token files: any sample or document as text, lengths, and duplicate documents.

    python tools/inspect_data.py sample 17 --data-path 0.7 a_text_document 0.3 b_text_document \\
        --seq-length 4096 --train-samples 100000 --tokenizer-type ... [--index-free]
    python tools/inspect_data.py document 3 --data-path a_text_document --tokenizer-type ...
    python tools/inspect_data.py lengths --data-path a_text_document b_text_document \\
        --output lengths.png
    python tools/inspect_data.py duplicates --data-path a_text_document b_text_document
    python tools/inspect_data.py near-duplicates --similarity 0.8 --data-path a_text_document

`sample` shows what training reads: each part with its origin, and the tokens without loss between
{- and -}.  Its order is that of a run with the same data flags, seed and number of samples.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.optional import require
from megatron.core.progress import Progress
from megatron.training.arguments.tokenizer_flags import _add_tokenizer_args
from megatron.training.config.data import DataConfig
from megatron.training.preprocess.cli import run_tool
from megatron.training.preprocess.corpus import sources_of
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.tokenizer import create_tokenizer

_SHOWN = 10  # groups of duplicates that are listed
_PHRASE = 5  # tokens
_PERMUTATIONS = 128  # of a MinHash; its error is about 1 / sqrt of it


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "action", choices=("sample", "document", "lengths", "duplicates", "near-duplicates")
    )
    parser.add_argument("numbers", nargs="*", type=int, help="of samples or documents, from 0")
    parser.add_argument(
        "--data-path", nargs="+", required=True, help="prefixes, with or without weights"
    )
    parser.add_argument("--output", metavar="PNG", help="draw a histogram of the lengths")
    parser.add_argument(
        "--similarity",
        type=float,
        default=0.8,
        help="smallest share of common 5-token phrases that makes documents near duplicates",
    )
    group = parser.add_argument_group("order of samples, as in training")
    group.add_argument("--seq-length", type=int, default=1024, help="tokens of a sample")
    group.add_argument("--train-samples", type=int, help="samples of the run; one epoch if missing")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--split", default="969,30,1", help="as in training")
    group.add_argument("--data-cache-path", help="directory of the index files")
    group.add_argument("--index-free", action="store_true", help="as in training")
    group.add_argument("--eod-mask-loss", action="store_true", help="as in training")
    _add_tokenizer_args(parser)
    for action in parser._actions:
        action.required = action.required and action.dest in ("action", "data_path")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = get_parser().parse_args(argv)
    blend = get_blend_from_list(args.data_path)
    assert blend is not None, "the parser requires a path"
    if args.action in ("sample", "document") and not args.numbers:
        raise ConfigError(f"{args.action} needs the numbers of what it shows, such as 0 1 2")
    if args.action == "lengths":
        print_lengths(blend[0], args.output)
    elif args.action == "duplicates":
        print_duplicates(blend[0])
    elif args.action == "near-duplicates":
        print_near_duplicates(blend[0], args.similarity)
    else:
        if args.tokenizer_type is None:
            raise ConfigError("--tokenizer-type is needed to show tokens as text: give it")
        tokenizer = create_tokenizer(TokenizerSpec.of(args))
        show = print_documents if args.action == "document" else print_samples
        show(args, blend, tokenizer)


def print_documents(
    args: argparse.Namespace, blend: tuple[list[str], Any], tokenizer: MegatronTokenizer
) -> None:
    """Print documents as text."""
    for prefix in blend[0]:
        data = IndexedDataset(prefix)
        documents = data.document_indices
        for number in args.numbers:
            if not 0 <= number < len(documents) - 1:
                raise ConfigError(f"document {number}: {prefix} has {len(documents) - 1}, from 0")
            parts = [data.get(i) for i in range(documents[number], documents[number + 1])]
            tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
            print(f"== {prefix}, document {number}: {len(tokens)} tokens")
            print(tokenizer.detokenize(tokens.tolist()))


def print_samples(
    args: argparse.Namespace, blend: tuple[list[str], Any], tokenizer: MegatronTokenizer
) -> None:
    """Print samples of the training data as a run reads them."""
    sources = sources_of(blend[0], DataConfig(data_cache_path=args.data_cache_path), tokenizer)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        create_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        index_free=args.index_free or bool(sources),
        corpora={source.path: source.directory for source in sources},  # that a run has tokenized
    )
    sizes = [args.train_samples, 0, 0]
    train: Any = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    for number in args.numbers:
        if not 0 <= number < len(train):
            raise ConfigError(f"sample {number}: there are {len(train)}, from 0")
        source = train
        within = number
        if isinstance(train, BlendedDataset):
            dataset_id, within = train.locate(number)
            source = train.datasets[dataset_id]
        row = source[within]
        print(f"== sample {number}: sample {within} of {source.dataset_path}")
        at = 0
        for sequence, offset, length in source.pieces(within):
            stop = min(at + length, args.seq_length)
            print(f"-- sequence {sequence}, tokens {offset} to {offset + length - 1}")
            print(_marked(row["tokens"][at:stop], row["loss_mask"][at:stop], tokenizer))
            at = stop


def _marked(tokens: Any, loss_mask: Any, tokenizer: MegatronTokenizer) -> str:
    """Return tokens as text, those whose label has no loss between {- and -}."""
    pairs = zip(tokens.tolist(), (loss_mask > 0).tolist(), strict=True)
    text = ""
    for is_trained, part in groupby(pairs, key=lambda pair: pair[1]):
        words = tokenizer.detokenize([token for token, _ in part])
        text += words if is_trained else "{-" + words + "-}"
    return text


def print_lengths(prefixes: Sequence[str], output: str | None) -> None:
    """Print how long the documents of each prefix are; draw a histogram into ``output``."""
    print(f"{'documents':>12} {'tokens':>15} {'empty':>8} {'median':>8} {'99 %':>9} {'max':>9}")
    lengths = {prefix: document_lengths(prefix) for prefix in prefixes}
    for prefix, found in lengths.items():
        filled = found if len(found) else np.zeros(1, np.int64)
        middle, high = np.percentile(filled, [50, 99])
        print(
            f"{len(found):>12,} {found.sum():>15,} {(found == 0).sum():>8,} {middle:>8,.0f} "
            f"{high:>9,.0f} {filled.max():>9,}  {prefix}"
        )
    if output is not None:
        draw_lengths(lengths, output)
        print(f"wrote {output}")


def document_lengths(prefix: str) -> np.ndarray:
    """Return i64[D], the number of tokens of each document."""
    data = IndexedDataset(prefix)
    ends = np.concatenate(([0], np.cumsum(data.sequence_lengths, dtype=np.int64)))
    lengths: np.ndarray = np.diff(ends[data.document_indices])
    return lengths


def draw_lengths(lengths: dict[str, np.ndarray], output: str) -> None:
    """Draw the shares of tokens by length of document, and the tokens of each source."""
    require("matplotlib", "tools/inspect_data.py --output").use("Agg")
    plt = require("matplotlib.pyplot", "tools/inspect_data.py --output")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1))
    most = max(2, *(int(found.max(initial=1)) for found in lengths.values()))
    bins = np.geomspace(1, most, 50)
    names = [Path(prefix).name for prefix in lengths]
    if len(set(names)) < len(names):
        names = list(lengths)
    for name, found in zip(names, lengths.values(), strict=True):
        filled = found[found > 0]
        left.hist(filled, bins, weights=filled / max(1, filled.sum()), histtype="step", label=name)
    left.set(xscale="log", xlabel="tokens of a document", ylabel="share of the tokens")
    left.legend(fontsize="small")
    right.barh(names, [int(found.sum()) for found in lengths.values()])
    right.set(xlabel="tokens")
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    plt.close(figure)


def print_duplicates(prefixes: Sequence[str]) -> None:
    """Print which documents have equal tokens, within one prefix and over all of them."""
    places: defaultdict[bytes, list[tuple[str, int]]] = defaultdict(list)
    num_documents = num_tokens = repeated_tokens = 0
    for prefix in prefixes:
        for number, tokens in enumerate(_documents(prefix)):
            key = hashlib.blake2b(tokens.astype(np.int64).tobytes(), digest_size=16).digest()
            places[key].append((prefix, number))
            num_documents += 1
            num_tokens += len(tokens)
            repeated_tokens += len(tokens) if len(places[key]) > 1 else 0
    groups = sorted((g for g in places.values() if len(g) > 1), key=len, reverse=True)
    repeated = sum(len(group) - 1 for group in groups)
    print(
        f"{repeated:,} of {num_documents:,} documents repeat an earlier one "
        f"({repeated_tokens:,} of {num_tokens:,} tokens)"
    )
    _print_groups(groups, "equal")


def print_near_duplicates(prefixes: Sequence[str], similarity: float) -> None:
    """Print which documents have about ``similarity`` of their phrases in common (MinHash, LSH).

    A document belongs to the first earlier one that is similar and begins a group.
    """
    if not 0 < similarity < 1:
        raise ConfigError(f"--similarity {similarity:g}: use a share above 0 and below 1")
    datasketch = require("datasketch", "tools/inspect_data.py near-duplicates")
    index = datasketch.MinHashLSH(threshold=similarity, num_perm=_PERMUTATIONS)
    sketches: list[Any] = []  # of the first document of each group
    groups: list[list[tuple[str, int]]] = []
    num_documents = 0
    for prefix in prefixes:
        for number, tokens in enumerate(_documents(prefix)):
            num_documents += 1
            if not len(tokens):
                continue
            values = np.ascontiguousarray(tokens, np.int64)
            windows = np.lib.stride_tricks.sliding_window_view(values, min(len(values), _PHRASE))
            sketch = datasketch.MinHash(_PERMUTATIONS)
            sketch.update_batch([window.tobytes() for window in windows])
            similar = [
                first
                for first in map(int, index.query(sketch))
                if sketch.jaccard(sketches[first]) >= similarity
            ]
            if similar:
                groups[min(similar)].append((prefix, number))
                continue
            index.insert(str(len(groups)), sketch)
            sketches.append(sketch)
            groups.append([(prefix, number)])
    found = sorted((g for g in groups if len(g) > 1), key=len, reverse=True)
    near = sum(len(group) - 1 for group in found)
    print(f"{near:,} of {num_documents:,} documents are similar to an earlier one")
    _print_groups(found, "similar")


def _print_groups(groups: Sequence[Sequence[tuple[str, int]]], what: str) -> None:
    for group in groups[:_SHOWN]:
        named = ", ".join(f"{prefix} {number}" for prefix, number in group[:5])
        print(f"  {len(group)} {what} documents: {named}{', ...' if len(group) > 5 else ''}")


def _documents(prefix: str) -> Iterator[np.ndarray]:
    """Yield the tokens of each document."""
    data = IndexedDataset(prefix)
    bounds = data.document_indices.tolist()
    with Progress(f"reading {prefix}", len(bounds) - 1, "documents") as progress:
        for first, last in zip(bounds, bounds[1:], strict=False):
            parts = data[first:last]
            progress.add(1)
            yield np.concatenate(parts) if parts else np.empty(0, np.int64)


if __name__ == "__main__":
    sys.exit(run_tool(main))
