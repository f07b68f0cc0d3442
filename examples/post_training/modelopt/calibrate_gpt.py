"""Measure the perplexity of a GPT on text, after it has been calibrated and quantized.

    python examples/post_training/modelopt/calibrate_gpt.py --task WIKITEXT103 \\
        --load CHECKPOINT --save QUANTIZED --export-quant-cfg fp8 \\
        --calib-data texts.jsonl --valid-data wiki.test.tokens

Without --export-quant-cfg, or with a quantized checkpoint in --load, it only measures.
"""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import only_weights, open_llm, parse, print_rank_0, run
from megatron.core.config.errors import ConfigError, DataError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.text_files import read_text
from megatron.post_training import quantization
from megatron.training.initialize import configure, connect, shut_down


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags of calibration."""
    quantization.add_flags(parser)
    group = parser.add_argument_group("evaluation")
    group.add_argument("--task", help="WIKITEXT103: perplexity of the texts of --valid-data")
    group.add_argument("--valid-data", nargs="*", default=[], metavar="FILE", help="text files")
    group.add_argument(
        "--overlapping-eval",
        type=int,
        default=32,
        help="tokens by which a window of --seq-length tokens is moved; each token is scored once, "
        "after as many tokens as possible (default 32)",
    )


def windows(tokens: list[int], length: int, stride: int) -> list[tuple[list[int], int]]:
    """Return windows of at most ``length`` + 1 tokens, each with the number of scored tokens."""
    found = []
    done = 1  # tokens that have a score; the first has none
    while done < len(tokens):
        end = min(done + (stride if found else length), len(tokens))
        found.append((tokens[max(end - length - 1, 0) : end], end - done))
        done = end
    return found


def main() -> None:
    """Calibrate if a recipe is given, then measure."""
    args = parse(add_flags)
    if args.task != "WIKITEXT103":
        raise ConfigError(
            f"--task {args.task}: use WIKITEXT103, or tools/run_lm_eval.py for LAMBADA and others"
        )
    if not args.valid_data:
        raise ConfigError("--valid-data is missing: give one text file or more")
    texts = [read_text(path, f"--valid-data {path}", DataError) for path in args.valid_data]
    written = None
    if args.save is not None and args.export_quant_cfg not in (None, "None"):
        only_weights(args)
        args.skip_train = True
        config = configure(parsed_args=args)
        connect(config)
        quantization.quantize_checkpoint(config)
        shut_down()
        written = args.save
    params = SamplingParams(prompt_log_probs_only=True)
    with ExitStack() as watch:
        llm = open_llm(args, watch, written)
        length = llm.engine.limits.max_sequence_length - 1
        stride = args.overlapping_eval
        if not 0 < stride <= length:
            raise ConfigError(f"--overlapping-eval {stride}: give 1 to {length} tokens")
        parts = [w for t in texts for w in windows(llm.tokenizer.tokenize(t), length, stride)]
        answers = llm.generate([tokens for tokens, _ in parts], params)
    llm.shut_down()
    scored = zip(answers, parts, strict=False)  # rank 0 has answers
    losses = [-t.log_prob for answer, (_, n) in scored for t in answer.prompt_scores[-n:]]
    if losses:
        mean = sum(losses) / len(losses)
        print_rank_0(f"perplexity {math.exp(mean):.4f} (loss {mean:.5f}, {len(losses)} tokens)")


if __name__ == "__main__":
    run(main)
