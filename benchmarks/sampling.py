"""Time the choice of the next tokens from logits on one CPU thread, in processor time.

    python -m benchmarks.sampling [--rounds 5]

For each case: this project's sampler, then transformers' logits processors with softmax and
multinomial, alternately; medians.  Dated results are in sampling.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from torch import Tensor

from megatron.core.inference.paged_engine.sampler import Sampler
from megatron.core.inference.paged_engine.step_plan import SAMPLE, Admission, Segment, StepPlan

_SHAPES = [(64, 50304), (1, 131072)]
_TEXT = tuple(range(1000))  # what penalties look at
_CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy, log-prob": {"temperature": 0.0, "return_log_probs": True},
    "greedy, top 5 log-probs": {"temperature": 0.0, "top_n_logprobs": 5},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.999": {"top_p": 0.999},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print("| logits | case | ms | transformers, ms |\n|---|---|---|---|")
    for count, vocab in _SHAPES:
        for scale in (1, 4):
            logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * scale
            for name, params in _CASES.items():
                here = _ours(logits, params)
                there = _theirs(logits, params)
                here(), there()
                times = [(_seconds(here), _seconds(there)) for _ in range(rounds)]
                ms = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
                print(
                    f"| {count} x {vocab}, deviation {scale} | {name} | {ms[0]:.3g} | {ms[1]:.3g} |"
                )


def _seconds(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def _ours(logits: Tensor, params: dict[str, float]) -> Callable[[], object]:
    sampler = Sampler(len(logits), logits.size(1), logits.device, 0)
    segments = []
    nothing = np.zeros(0, np.int64)
    last = np.array(_TEXT[-1:])
    for slot in range(len(logits)):
        sampler.admit(Admission(slot, {**params, "seed": slot}, _TEXT, len(_TEXT)))
        segments.append(Segment(slot, len(_TEXT) - 1, last, nothing, np.array([SAMPLE])))
    plan = StepPlan(segments)
    return lambda: sampler.sample(logits, plan)


def _theirs(logits: Tensor, params: dict[str, float]) -> Callable[[], object]:
    processors = transformers.LogitsProcessorList()
    if "repetition_penalty" in params:
        penalty = params["repetition_penalty"]
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    if "top_k" in params:
        processors.append(transformers.TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        processors.append(transformers.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        processors.append(transformers.MinPLogitsWarper(params["min_p"]))
    texts = torch.tensor([_TEXT]).expand(len(logits), -1)

    def run() -> Tensor:
        scores = processors(texts, logits)
        if params.get("return_log_probs") or params.get("top_n_logprobs"):
            torch.log_softmax(scores, -1).topk(int(params.get("top_n_logprobs", 1)))
        if params.get("temperature") == 0:
            return scores.argmax(-1)
        return torch.multinomial(torch.softmax(scores, -1), 1)

    return run


if __name__ == "__main__":
    main()
