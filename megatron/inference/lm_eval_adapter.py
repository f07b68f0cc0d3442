"""Evaluate a checkpoint with lm-eval (EleutherAI's evaluation harness), without exporting it.

`register` adds the model ``megatron``: ``--model megatron --model_args load=DIR,...``.  The results
are those of lm-eval's ``hf`` model with the exported checkpoint.  Rank 0 runs lm-eval; the other
ranks call `follow` with the same model arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megatron.core.config.errors import ConfigError
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import Request, TokenOutput
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.optional import require
from megatron.inference.engine_flags import GenerationLayout
from megatron.inference.generation import Writer, open_writer
from megatron.inference.text import SampleText, TextRules

Tokens: TypeAlias = list[int]
Score: TypeAlias = tuple[float, bool]  # log-probability, whether each token is the most likely one

NAME = "megatron"
_WANTED_BY = f"lm-eval's --model {NAME}"
_LAYOUT = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "expert_model_parallel_size": "expert",
}
_OTHERS = ("load", "ckpt_step", "max_length", "max_requests", "max_gen_toks")
_ADDED = ("device", "batch_size", "max_batch_size")  # lm-eval's flags; batches are the engine's


def register() -> list[Writer]:
    """Register the model with lm-eval.

    Returns a list to which each model adds its engine: the caller closes them, which lets the other
    ranks return from `follow`.
    """
    require("lm_eval.models", _WANTED_BY)  # registers lm-eval's own models
    registry = require("lm_eval.api.registry", _WANTED_BY)
    base = require("lm_eval.api.model", _WANTED_BY).TemplateLM
    opened: list[Writer] = []
    registry.register_model(NAME)(type("MegatronLM", (_Adapter, base), {"opened": opened}))
    return opened


def follow(model_args: dict[str, Any]) -> None:
    """Compute with rank 0 until it closes its model."""
    _open(model_args).engine.follow()


def _open(model_args: dict[str, Any]) -> Writer:
    """Build the engine that ``model_args`` describe.  Collective over all ranks."""
    known = (*_LAYOUT, *_OTHERS)
    for name in model_args:
        if name not in (*known, *_ADDED):
            raise ConfigError(f"model argument {name} is unknown; there are: {', '.join(known)}")
    if "load" not in model_args:
        raise ConfigError("model argument load is missing: give the checkpoint, load=DIR")
    numbers = {name: int(n) for name, n in model_args.items() if name in (*_LAYOUT, *_OTHERS[1:])}
    sizes = {axis: numbers[name] for name, axis in _LAYOUT.items() if name in numbers}
    longest = numbers.get("max_length")
    return open_writer(
        str(model_args["load"]),
        step=numbers.get("ckpt_step"),
        device_kind=str(model_args.get("device") or "auto").partition(":")[0],
        layout=GenerationLayout(**sizes),
        options=EngineOptions(
            max_requests=numbers.get("max_requests", 64),
            max_waiting=sys.maxsize,
            max_sequence_length=longest and longest + 1,
        ),
    )


class _Adapter:
    """Methods that lm-eval calls; its `TemplateLM` splits texts into context and continuation."""

    opened: list[Writer]

    def __init__(self, **model_args: Any) -> None:
        super().__init__()
        self._writer = _open({k: v for k, v in model_args.items() if v is not None})
        self.opened.append(self._writer)
        self._tokenizer = self._writer.tokenizer
        if self._writer.engine.model.decoder_start is not None:
            raise ConfigError("lm-eval scores decoder-only models: an encoder-decoder has no score")
        # The engine counts the last token of a window, which is scored but not processed.
        self.max_length = self._writer.engine.limits.max_sequence_length - 1
        self.max_gen_toks = int(model_args.get("max_gen_toks") or 256)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context, as in lm-eval's model ``hf``."""
        begin = self._tokenizer.id_of("bos")
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Return the ids of a text, with the special tokens of training around them by default.

        A text that begins with BOS gets no second one.
        """
        if not string or add_special_tokens is False:
            return self._tokenizer.tokenize_plain(string) if string else []
        ids = self._tokenizer.tokenize(string)
        bos = self._tokenizer.id_of("bos")
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _loglikelihood_tokens(
        self, requests: Iterable[tuple[Any, Tokens, Tokens]], **_: Any
    ) -> list[Score]:
        """Score each continuation behind its context, whose start is dropped if it is too long."""
        params = SamplingParams(
            prompt_log_probs_only=True, top_n_logprobs=1, return_prompt_top_n_logprobs=True
        )
        rows = [
            ((context + continuation)[-(self.max_length + 1) :], len(continuation))
            for _, context, continuation in requests
        ]
        collected = self._run((tokens, params, ()) for tokens, _ in rows)
        scores = [
            result.scores[-length:] for result, (_, length) in zip(collected, rows, strict=True)
        ]
        # The sum of log-probabilities, and whether greedy decoding gives these tokens.
        return [
            (sum(t.log_prob for t in found), all(t.token == t.top[0][0] for t in found))
            for found in scores
        ]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, in windows of the model's length."""
        utils = require("lm_eval.utils", _WANTED_BY)
        windows = [
            [
                (None, *utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([w for text in windows for w in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first of its stop strings."""
        return [result.text for result in self._run(self._generation(*r.args) for r in requests)]

    def _generation(
        self, context: str, asked: dict[str, Any]
    ) -> tuple[Tokens, SamplingParams, tuple[str, ...]]:
        """Return prompt, parameters and stop strings of lm-eval's ``gen_kwargs``."""
        until = asked.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(until)
        length = int(asked.get("max_gen_toks") or self.max_gen_toks)
        if length >= self.max_length:
            raise ConfigError(
                f"max_gen_toks {length}: the model takes {self.max_length} tokens, prompt "
                "included; generate fewer"
            )
        params = SamplingParams(num_tokens_to_generate=length, temperature=0.0)
        if asked.get("do_sample") or asked.get("temperature", 0) > 0:
            params = SamplingParams(
                num_tokens_to_generate=length,
                temperature=float(asked.get("temperature", 1.0)),
                top_k=int(asked.get("top_k", 0)),
                top_p=float(asked.get("top_p", 0.0)),
            )
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        return prompt[length - self.max_length :], params, tuple(stop for stop in stops if stop)

    def _run(
        self, asked: Iterable[tuple[Tokens, SamplingParams, tuple[str, ...]]]
    ) -> list[_Result]:
        """Run requests to their end."""
        engine = self._writer.engine
        rules = frozenset({self.eot_token_id})
        results = {}
        for number, (tokens, params, stops) in enumerate(asked):
            engine.add(Request(str(number), tokens, params))
            state = SampleText(self._tokenizer.detokenize, TextRules(rules, stops))
            results[str(number)] = _Result(state)
        for output in engine.run_to_end(()):
            result = results[output.request_id]
            result.scores += output.prompt_scores
            delta = result.state.add(output)
            result.text += delta.text
            if isinstance(delta.stopped_by, str):
                engine.abort(output.request_id)
        return list(results.values())


@dataclass
class _Result:
    """Scores of a request's prompt, and its text so far."""

    state: SampleText
    text: str = ""
    scores: list[TokenOutput] = field(default_factory=list)
