"""Build a RETRO project: a database of chunks, an index of them, and the neighbors of each sample.

    python tools/retro/preprocess_data.py --retro-project-dir DIR --load BERT ...
    torchrun --nproc-per-node 8 tools/retro/preprocess_data.py --retro-project-dir DIR ...

--load is a BERT checkpoint, or a folder of Hugging Face with a config.json, whose mean hidden
states are the embeddings.  Several processes divide the blocks of each task.  A task that was
killed continues when it is started again; flags that a project has in its config.json need not be
given again.  The flags and tasks are Megatron-LM's.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from torch import distributed as dist

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.retro.blocks import Ranks
from megatron.core.datasets.retro.db import build_db
from megatron.core.datasets.retro.index import ChunkIndex, RetroGPTChunkDatasets
from megatron.core.datasets.retro.project import (
    OF_A_CALL,
    RetroPreprocessingConfig,
    get_config_path,
    load_project,
    save_project,
)
from megatron.core.optional import require
from megatron.inference.embedding import (
    Embedder,
    embed_texts,
    huggingface_embedder,
    megatron_embedder,
)
from megatron.inference.engine_flags import GenerationLayout
from megatron.training.arguments.parser import parse_args
from megatron.training.initialize import shut_down
from megatron.training.preprocess.cli import run_tool
from megatron.training.process.rank_print import is_rank0, print_rank_0, rank, world_size
from megatron.training.process.signals import end_with_launcher
from megatron.training.process.user_code import parse_tool_args
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.fingerprint import check_data
from megatron.training.tokenizer.tokenizer import create_tokenizer

TASKS = ("db-build", "index-train", "index-add", "query-neighbors")
_SHORT = {"build": TASKS, "index-build": TASKS[1:3]}
_NEEDED = (
    "retro_project_dir retro_gpt_data_path retro_gpt_tokenizer_type retro_gpt_seq_length "
    "retro_gpt_train_samples retro_gpt_eval_interval retro_gpt_eval_iters "
    "retro_gpt_global_batch_size retro_bert_load retro_index_str"
).split()
_HELP = {
    "retro_project_dir": "folder of the project",
    "retro_tasks": "tasks, separated by commas: db-build, index-train, index-add, query-neighbors; "
    "index-build is both tasks of the index, build all four",
    "retro_task_validate": "compute this fraction of the blocks of the tasks again and compare",
    "retro_block_size": "chunks in a file",
    "retro_doc_block_size": "documents in a file of the database",
    "retro_gpt_data_path": "--data-path of training; relative prefixes start in DIR/data",
    **{
        f"retro_gpt_{name}": f"--{name.replace('_', '-')} of training; relative to DIR"
        for name in ("tokenizer_model", "vocab_file", "merge_file")
    },
    "retro_gpt_chunk_length": "tokens in a chunk",
    "retro_bert_tokenizer_type": "tokenizer of BERT; it must be that of the checkpoint",
    "retro_bert_vocab_file": "vocabulary of BERT; it must be that of the checkpoint; "
    "relative to DIR",
    "retro_bert_batch_size": "chunks that BERT embeds at once",
    "retro_bert_max_chunk_length": "maximum of BERT tokens of a chunk; more are cut off",
    "retro_index_type": "name of the folder of the index; the index is the same",
    "retro_index_str": "string of faiss's index factory, such as IVF1024,Flat",
    "retro_index_ntrain": "chunks whose embeddings train the index; default: all",
    "retro_index_train_load_fraction": "fraction of each block of embeddings that trains the index",
    "retro_index_add_load_fraction": "fraction of each block of codes that is added to the index",
    "retro_index_delete_training_embeddings": "keep the embeddings after training the index",
    "retro_index_delete_added_codes": "keep the codes after adding them to the index",
    "retro_query_ef_search": "efSearch of an HNSW quantizer",
    "retro_query_nprobe": "lists of an IVF index that a query reads",
    "retro_query_num_neighbors_query": "neighbors that are looked up; those of the sample's own "
    "documents are then left out",
    "retro_query_num_neighbors_save": "neighbors that are saved for each chunk",
}


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(RetroPreprocessingConfig)
    for field in dataclasses.fields(RetroPreprocessingConfig):
        name = field.name
        if name in ("retro_bert_load", "retro_neighbor_dirs"):
            continue
        of_training = name.removeprefix("retro_gpt_").replace("_", "-")
        words: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,  # that of the project, or of the class
            "help": _HELP.get(name, f"--{of_training} of training")
            + (f" (default {field.default})" if field.default not in (None, True) else ""),
        }
        if field.default is True:
            words["action"] = "store_false"
        elif name == "retro_gpt_data_path":
            words["nargs"] = "*"
        else:
            kinds = [k for k in typing.get_args(hints[name]) if k is not type(None)]
            words["type"] = kinds[0] if kinds else hints[name]
        parser.add_argument(flag_of(name), **words)
    parser.add_argument("--load", help="a BERT checkpoint, or a Hugging Face folder")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; default: the newest")
    parser.add_argument(
        "--bert-embedder-type",
        choices=("megatron", "huggingface"),
        help="what --load holds: a checkpoint of training, or a folder of Hugging Face; default: "
        "huggingface if it has a config.json",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    end_with_launcher()  # a rank that outlives torchrun would meet those of the next start
    args = parse_tool_args(get_parser, known_flags(argv))
    config = config_of(args)
    tasks = tasks_of(config)
    for package in ("faiss", "h5py"):
        require(package, "tools/retro/preprocess_data.py")
    tokenizer = gpt_tokenizer(config)
    load = str(config.retro_bert_load)
    if args.bert_embedder_type is None:  # a later call on the project finds the same
        is_folder = os.path.isfile(os.path.join(load, "config.json"))
        args.bert_embedder_type = "huggingface" if is_folder else "megatron"
    embedder = open_embedder(load, args)
    check_bert_tokenizer(config, embedder)
    ranks = open_ranks()
    if is_rank0():
        save_project(config)
    ranks.wait_for_all()
    run_tasks(config, tasks, tokenizer, embedder, ranks)
    if dist.is_initialized():
        shut_down() if args.bert_embedder_type == "megatron" else dist.destroy_process_group()


def run_tasks(
    config: RetroPreprocessingConfig,
    tasks: Sequence[str],
    tokenizer: MegatronTokenizer,
    embedder: Embedder,
    ranks: Ranks,
) -> None:
    """Run the tasks, or validate them.  Collective over ``ranks``."""
    fraction = config.retro_task_validate

    def num_bert_tokens(tokens: np.ndarray) -> int:
        return len(embedder.tokenize(tokenizer.detokenize(tokens.tolist())))

    embed = partial(
        embed_texts,
        embedder,
        batch_size=config.retro_bert_batch_size,
        longest=config.retro_bert_max_chunk_length,
    )
    index = ChunkIndex(config, tokenizer, embed, ranks)
    for task in tasks:
        if task == "db-build":
            count = build_db(config, num_bert_tokens, tokenizer.eod, ranks, fraction)
        elif task == "query-neighbors":
            count = index.query(query_datasets(config, tokenizer), fraction)
        elif fraction is not None:
            count = index.validate(task, fraction)
        else:
            index.train() if task == "index-train" else index.add()
        words = "done" if fraction is None else f"{count} blocks of this rank are as computed again"
        print_rank_0(f"{task}: {words}")


def query_datasets(
    config: RetroPreprocessingConfig, tokenizer: MegatronTokenizer
) -> RetroGPTChunkDatasets:
    """Build the datasets of training, with as many samples as training reads."""
    batch = config.retro_gpt_global_batch_size or 1
    train = config.retro_gpt_train_samples or 0
    test = (config.retro_gpt_eval_iters or 0) * batch
    valid = (train // batch // (config.retro_gpt_eval_interval or 1) + 1) * test
    settings = GPTDatasetConfig(
        random_seed=config.retro_gpt_seed,
        sequence_length=config.retro_gpt_seq_length or 0,
        blend=config.blend,
        split=config.retro_gpt_split,
        path_to_cache=config.retro_gpt_data_cache_path,
        tokenizer=tokenizer,
        create_attention_mask=False,
    )
    sizes = [train, valid, test]
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
    pairs = zip(built, sizes, strict=True)
    return RetroGPTChunkDatasets(*(None if data is None else (data, n) for data, n in pairs))


def known_flags(argv: Sequence[str] | None) -> list[str]:
    """Return the command line without flags of training, which Megatron-LM's program takes.

    They describe the BERT model, which its checkpoint describes too.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _, rest = get_parser().parse_known_args(words)
    if "--import-module" in rest or not any(word.startswith("--") for word in rest):
        return words
    parse_args(argv=rest)  # ends the program if one is unknown
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    print_rank_0(f"WARNING: {', '.join(flags)}: without effect, --load has the BERT model")
    left = iter(rest)
    skipped = next(left, None)
    known = []
    for word in words:
        if word == skipped:
            skipped = next(left, None)
        else:
            known.append(word)
    return known


def config_of(args: argparse.Namespace) -> RetroPreprocessingConfig:
    """Return the settings: those given, then those of the project.  Raises ConfigError."""
    given = {name: value for name, value in vars(args).items() if name.startswith("retro_")}
    if "retro_gpt_data_path" in given:
        given["retro_gpt_data_path"] = tuple(given["retro_gpt_data_path"])
    if args.load is not None:
        given["retro_bert_load"] = os.path.abspath(args.load)
    folder = given.get("retro_project_dir")
    if folder is not None and os.path.exists(get_config_path(folder)):
        before = load_project(folder)
        config = dataclasses.replace(before, **given)
        ConfigError.raise_for(differences(before, config))
    else:
        config = RetroPreprocessingConfig(**given)
    ConfigError.raise_for(problems_of(config))
    return config


def differences(before: RetroPreprocessingConfig, now: RetroPreprocessingConfig) -> list[str]:
    """Return one message for each setting of the project that ``now`` changes."""
    names = vars(now).keys() - OF_A_CALL - {"retro_neighbor_dirs"}
    return [
        f"{flag_of(name)} {vars(now)[name]}: the project {before.retro_project_dir} was begun with "
        f"{vars(before)[name]}; give this value, or another --retro-project-dir"
        for name in sorted(names)
        if vars(now)[name] != vars(before)[name]
    ]


def flag_of(name: str) -> str:
    """Return the flag of a field of the config."""
    if name == "retro_bert_load":
        return "--load"
    switch = "no-" if name.startswith("retro_index_delete") else ""
    return f"--{switch}{name.replace('_', '-')}"


def problems_of(config: RetroPreprocessingConfig) -> list[str]:
    """Return one message for each setting that is missing or wrong."""
    values = vars(config)
    found = [
        f"{flag_of(name)} is missing: it belongs to the settings of a project"
        for name in _NEEDED
        if values[name] is None
    ]
    fractions = [name for name in values if name.endswith(("fraction", "validate"))]
    at_least_one = [
        name
        for name, value in values.items()
        if type(value) is int and name not in ("retro_gpt_seed", "retro_gpt_eval_iters")
    ]
    found += [f"{flag_of(n)} {values[n]}: at least 1" for n in at_least_one if values[n] < 1]
    found += [
        f"{flag_of(name)} {values[name]}: give a fraction above 0, at most 1"
        for name in fractions
        if values[name] is not None and not 0 < values[name] <= 1
    ]
    length = config.retro_gpt_seq_length or 0
    chunk = config.retro_gpt_chunk_length
    if chunk > 0 and length % chunk:
        found.append(
            f"--retro-gpt-seq-length {length} is no multiple of --retro-gpt-chunk-length {chunk}: "
            "a sample holds complete chunks"
        )
    saved = config.retro_query_num_neighbors_save
    if saved > (queried := config.retro_query_num_neighbors_query):
        found.append(
            f"--retro-query-num-neighbors-save {saved}: it exceeds "
            f"--retro-query-num-neighbors-query {queried}; raise that, or lower this"
        )
    unknown = {*config.retro_tasks.split(",")} - {*TASKS, *_SHORT}
    if unknown:
        names = ", ".join((*TASKS, *_SHORT))
        found.append(f"--retro-tasks {','.join(sorted(unknown))}: give one or more of {names}")
    return found


def tasks_of(config: RetroPreprocessingConfig) -> list[str]:
    """Return the tasks that are asked for, in their order."""
    asked = [task for word in config.retro_tasks.split(",") for task in _SHORT.get(word, (word,))]
    return [task for task in TASKS if task in asked]


def gpt_tokenizer(config: RetroPreprocessingConfig) -> MegatronTokenizer:
    """Build the tokenizer of the corpora.  Raises an error if they are of another."""
    given = {"tokenizer_type": config.retro_gpt_tokenizer_type}
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        if (file := vars(config)[f"retro_gpt_{name}"]) is not None:
            given[name] = os.path.join(config.project_dir, file)
    tokenizer = create_tokenizer(TokenizerSpec.of(argparse.Namespace(**given)))
    for prefix in config.blend[0]:
        check_data(IndexedDataset(prefix), tokenizer, tokenizer.vocab_size)
    return tokenizer


def open_embedder(load: str, args: argparse.Namespace) -> Embedder:
    """Load the BERT model; each rank has all of it."""
    if args.bert_embedder_type == "huggingface":
        return huggingface_embedder(load, device_kind=args.device)
    layout = GenerationLayout(tensor=1)
    return megatron_embedder(load, step=args.ckpt_step, device_kind=args.device, layout=layout)


def check_bert_tokenizer(config: RetroPreprocessingConfig, embedder: Embedder) -> None:
    """Raise ConfigError if the flags name another tokenizer than that of the checkpoint."""
    kind = config.retro_bert_tokenizer_type
    file = config.retro_bert_vocab_file
    if file is None:
        return
    path = os.path.join(config.project_dir, file)
    spec = TokenizerSpec(tokenizer_type=kind or "BertWordPieceLowerCase", vocab_file=path)
    tokenizer = create_tokenizer(spec)
    text = " ".join(sorted(tokenizer.vocab)) + " Hello, World! 1,234"
    if tokenizer.cls != embedder.cls or tokenizer.tokenize(text) != embedder.tokenize(text):
        raise ConfigError(
            f"--retro-bert-vocab-file {file} (--retro-bert-tokenizer-type {kind}): the checkpoint "
            f"{config.retro_bert_load} was trained with another tokenizer; give its own, or none"
        )


def open_ranks() -> Ranks:
    """Return the ranks of the tasks.  They may wait for hours while rank 0 trains an index."""
    if world_size() == 1:
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    wait: Callable[[], Any] = partial(dist.barrier, group)
    return Ranks(rank(), world_size(), wait)


if __name__ == "__main__":
    sys.exit(run_tool(main))
