"""Generate text for prompts with a checkpoint, on all replicas of the model that the ranks hold.

    torchrun --nproc-per-node 2 examples/inference/offline_inference.py --load checkpoints \\
        --prompts "def main(" "import" --stop-words "return"

Model and tokenizer are those of the checkpoint.  Rank 0 gives each prompt to the replica with the
fewest requests; the other ranks execute its steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # installed or not

from examples.inference.common import add_flags, prompts, sampling_params, write
from megatron.core.config.errors import ConfigError, MegatronError
from megatron.inference import LLM
from megatron.inference.engine_flags import engine_options, generation_layout
from megatron.inference.llm import Answer
from megatron.inference.text import SampleText, TextRules
from megatron.training.arguments.parser import parse_args
from megatron.training.process.exit_report import exit_code
from megatron.training.process.rank_print import is_rank0


def add_offline_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of prompts and sampling, and those of this script."""
    group = add_flags(parser).add_argument_group("offline inference")
    group.add_argument(
        "--stop-words", nargs="+", default=[], metavar="TEXT", help="Strings that end an answer."
    )
    group.add_argument(
        "--use-coordinator",
        action="store_true",
        help="Without effect: rank 0 always distributes the prompts over the replicas.",
    )
    group.add_argument(
        "--async-mode", action="store_true", help="Print each answer as soon as it ends."
    )
    parser.set_defaults(inference_dynamic_batching=True, record_throughput=True)
    return parser


def main() -> None:
    """Load the model, generate and report."""
    try:
        args = parse_args(add_offline_flags)
        if args.load is None:
            raise ConfigError("--load is missing: give the directory that training saved to")
        llm = LLM.load(
            args.load,
            step=args.ckpt_step,
            device_kind=args.device,
            layout=generation_layout(args),
            options=engine_options(args),
            strictness="log_all" if args.inference_ckpt_non_strict else None,
        )
        arrivals = prompts(args)
        if is_rank0():
            for _ in range(args.inference_repeat_n):
                generate(llm, args, arrivals)
            llm.engine.close()
        else:
            llm.engine.follow()
        llm.shut_down()
    except (MegatronError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def generate(llm: LLM, args: argparse.Namespace, arrivals: list[tuple[float, str]]) -> None:
    """Generate while prompts arrive, and report; on rank 0, while the other ranks follow."""
    engine = llm.engine
    params = sampling_params(args)
    waiting = deque(enumerate(arrivals))
    answers = [Answer(prompt) for _, prompt in arrivals]
    texts: dict[int, SampleText] = {}
    begun_at: dict[int, float] = {}
    latency: dict[int, float] = {}
    begin = time.perf_counter()
    while waiting or engine.has_unfinished:
        arrived = 0
        while waiting and waiting[0][1][0] <= time.perf_counter() - begin:
            if arrived == args.incoming_requests_per_step:
                break
            number, (_, prompt) = waiting.popleft()
            ids = llm.tokenizer.tokenize(prompt)
            engine.add(engine.model.request(str(number), ids, params))
            ends = {*params.stop_token_ids, *([] if params.ignore_eos else [engine.model.eod])}
            rules = TextRules(frozenset(ends - {None}), args.stop_words, params.min_tokens)
            texts[number] = SampleText(llm.tokenizer.detokenize, rules, ids)
            begun_at[number] = time.perf_counter()
            arrived += 1
        for output in engine.step():
            number = int(output.request_id)
            delta = texts[number].add(output)
            answer = answers[number]
            answer.text += delta.text
            answer.tokens += [placed.output for placed in delta.tokens]
            answer.prompt_scores += output.prompt_scores
            if delta.finish_reason is not None:
                engine.abort(output.request_id)  # at a stop string it still runs
                latency[number] = time.perf_counter() - begun_at[number]
                if args.async_mode:
                    print(f"{number} ends: {answer.text!r}", flush=True)
    rows = {}
    for number, answer in enumerate(answers):
        print(f"{answer.prompt!r} -> {answer.text!r}")
        rows[number] = {
            "input_prompt": answer.prompt,
            "generated_text": answer.text,
            "generated_tokens": [token.token for token in answer.tokens],
            "latency": latency[number],
        }
        if args.return_log_probs:
            scores = (*answer.prompt_scores, *answer.tokens)
            rows[number]["logprobs"] = [token.log_prob for token in scores]
    write(args, rows, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
