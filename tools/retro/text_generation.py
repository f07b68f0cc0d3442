"""Continue a text with a checkpoint of pretrain_retro.py.

    python tools/retro/text_generation.py --load DIR --prompt "..." --neighbors passages.txt
    python tools/retro/text_generation.py --load DIR --prompt "..." --retro-project-dir D --bert D

Each line of the file is a passage, such as a search engine has found; the first passages are the
neighbors of every chunk of the text.  With a project each complete chunk is looked up in its index.
Each token costs a pass over the whole text: the encoder's output changes with every complete chunk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.retro.db import load_db
from megatron.core.datasets.retro.index import ChunkIndex
from megatron.core.datasets.retro.project import load_project
from megatron.core.utils import get_attr_wrapped_model
from megatron.inference.embedding import embed_texts, huggingface_embedder
from megatron.inference.generation import generation_config, load_model
from megatron.training.checkpointing.checkpoint_args import without_code_and_paths
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.initialize import connect
from megatron.training.models.registry import model_kind
from megatron.training.preprocess.cli import run_tool
from megatron.training.process.rank_print import print_rank_0
from megatron.training.process.user_code import parse_tool_args

# Ids of a complete chunk [m] -> the ids of its neighbors, k x at most r.
Retrieve = Callable[[Sequence[int]], Sequence[Sequence[int]]]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Continue a text with a RETRO model and given passages.", allow_abbrev=False
    )
    parser.add_argument("--load", required=True, help="directory that training saved to")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; default: the newest")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument(
        "--neighbors", help="file with a passage in each line; without neighbors the model is a GPT"
    )
    parser.add_argument("--retro-project-dir", help="project whose index finds the neighbors")
    parser.add_argument("--bert", help="Hugging Face folder of the BERT of that project")
    parser.add_argument("--num-tokens", type=int, default=100, help="most tokens to write")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of tokens")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Load the checkpoint, write, and print prompt and answer.  Collective over all ranks."""
    args = parse_tool_args(build_parser, argv)
    if args.num_tokens < 1 or args.temperature < 0:
        raise ConfigError("--num-tokens needs at least 1, --temperature at least 0")
    content = open_checkpoint(args.load, args.ckpt_step)
    asked = without_code_and_paths(content.asked, {})
    kind = model_kind(asked.get("model_kind"))
    if not kind.reads_neighbors:
        raise ConfigError(
            f"--load {args.load} holds a model of {kind.entry_script}, which reads no neighbors: "
            "use tools/text_generation_cli.py"
        )
    if (args.retro_project_dir is None) != (args.bert is None):
        raise ConfigError("--retro-project-dir and --bert find neighbors together: give both")
    if args.neighbors is not None and args.bert is not None:
        raise ConfigError("--neighbors and --retro-project-dir both give neighbors: leave one out")
    if args.neighbors is None and args.bert is None:
        asked = {**asked, "retro_attention_gate": 0.0}
    config = generation_config(asked, args.load, step=args.ckpt_step, device_kind=args.device)
    connect(config)
    run, module = load_model(config, parallel_output=False)
    tokenizer = run.tokenizer
    retrieve: Retrieve | None = None
    count = config.retro.retro_num_neighbors
    if args.neighbors is not None:
        passages = read_passages(args.neighbors, count)
        found = [tokenizer.tokenize(passage) for passage in passages]

        def retrieve(chunk: Sequence[int]) -> Sequence[Sequence[int]]:
            return found

    elif args.bert is not None:
        project = load_project(args.retro_project_dir)
        embed = partial(
            embed_texts,
            huggingface_embedder(args.bert, device_kind=args.device),
            batch_size=1,
            longest=project.retro_bert_max_chunk_length,
        )
        index = ChunkIndex(project, tokenizer, embed)
        retrieve = partial(look_up, index, count, config.retro.retro_num_retrieved_chunks)

    words = write(
        module,
        tokenizer.tokenize(args.prompt),
        retrieve,
        num_tokens=args.num_tokens,
        eod=tokenizer.eod,
        temperature=args.temperature,
        seed=args.seed,
    )
    print_rank_0(args.prompt + tokenizer.detokenize(words))


def read_passages(path: str, count: int) -> list[str]:
    """Return the first ``count`` lines.  Raises DataError if there are fewer."""
    try:
        lines = [x for x in Path(path).read_text(encoding="utf-8").splitlines() if x.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"--neighbors {path} cannot be read: {error}") from error
    if len(lines) < count:
        raise DataError(
            f"--neighbors {path} has {len(lines)} passages, and the model reads {count} for each "
            "chunk: add some"
        )
    return lines[:count]


def look_up(
    index: ChunkIndex, count: int, num_chunks: int, chunk: Sequence[int]
) -> list[Sequence[int]]:
    """Return the tokens of the ``count`` nearest neighbors, each with its continuation.

    A neighbor that the index does not find has no tokens.
    """
    database = load_db(index.config, "train", index.tokenizer.eod)
    (ids,) = index.search(index.embed_tokens([np.array(chunk)]), count)
    found = [database.with_continuation(int(i), num_chunks)[1].tolist() for i in ids if i >= 0]
    return [*found, *[[]] * (count - len(found))]


@torch.no_grad()
def write(
    module: Any,
    tokens: Sequence[int],
    retrieve: Retrieve | None,
    *,
    num_tokens: int,
    eod: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Return the tokens after ``tokens``, until ``eod`` or the model's longest text.

    ``retrieve`` is called once for each complete chunk; without it the model is a GPT.  Collective
    over the tensor-parallel group.
    """
    model = get_attr_wrapped_model(module, "reads_neighbors", return_model_obj=True)
    m = model.config.retro_chunk_length
    text = [*tokens] or [eod]
    num_given = len(text)
    neighbors: list[Sequence[Sequence[int]]] = []
    random = torch.Generator().manual_seed(seed)
    while len(text) < min(num_given + num_tokens, model.max_sequence_length):
        for at in range(len(neighbors) * m, len(text) - m + 1, m):
            if retrieve is not None:
                neighbors.append(retrieve(text[at : at + m]))
        logits = _next_logits(module, model.config.retro_retrieved_length, text, neighbors, eod)
        if temperature == 0:
            word = int(logits.argmax())
        else:
            word = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=random))
        if word == eod:
            break
        text.append(word)
    return text[num_given:]


def _next_logits(
    module: Any,
    length: int,
    text: Sequence[int],
    neighbors: Sequence[Sequence[Sequence[int]]],
    eod: int,
) -> Tensor:
    """Return the logits [v] of the token after ``text``, on the host."""
    ids = torch.tensor([text], device=device.current())
    rows = [
        [*each[:length], *[eod] * (length - len(each))] for found in neighbors for each in found
    ]
    context = torch.tensor(rows, device=ids.device) if rows else None
    positions = torch.arange(len(text), device=ids.device)[None]
    logits: Tensor = module(ids, positions, None, context_input_ids=context)
    return logits[0, -1].float().cpu()


if __name__ == "__main__":
    sys.exit(run_tool(main))
