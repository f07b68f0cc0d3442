"""Text in, text out: tokenize prompts, generate with the paged engine, detokenize.

Tensors of tokens are [b, s]: ``b`` sequences of ``s`` tokens; ``v`` is the vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.inference.async_stream import AsyncStream
from megatron.core.inference.inference_request import InferenceRequest, Status
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.inference.paged_engine.collective_engine import CollectiveEngine
from megatron.core.inference.paged_engine.engine import EngineOptions
from megatron.core.inference.paged_engine.prompt_images import PromptImage, text_of
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.sampling.one_step import sample_tokens
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.answers import Answer, token_texts

_ENDLESS = 2**62  # bytes, requests: no limit


class TextGenerationController:
    """A wrapped model with its tokenizer.

    ``tokenizer`` has ``tokenize``, ``detokenize``, ``vocab_size`` and ``eod`` (or ``eos_id``).
    """

    def __init__(
        self,
        inference_wrapped_model: AbstractModelInferenceWrapper,
        tokenizer: Any,
        pp_group: ProcessGroup | None = None,
    ) -> None:
        """``pp_group`` defaults to the group that the model was built with."""
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer
        self.pp_group = inference_wrapped_model.pp_group if pp_group is None else pp_group
        self.max_requests = inference_wrapped_model.inference_wrapper_config.inference_max_requests
        self._engine: CollectiveEngine | None = None

    # ---- text ----------------------------------------------------------------------------------

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:  # noqa: N803
        """Return the tokens of a prompt: with BOS if ``add_BOS``, else without."""
        tokens = [int(token) for token in self.tokenizer.tokenize(prompt)]
        bos = getattr(self.tokenizer, "bos", None)
        if add_BOS and bos is None:
            raise ConfigError("add_BOS: the tokenizer has no BOS token; leave out add_BOS")
        while bos is not None and tokens and tokens[0] == bos:
            tokens.pop(0)
        return [int(bos), *tokens] if add_BOS and bos is not None else tokens

    def detokenize_generations(
        self,
        tokens_gpu_tensor: Tensor,
        lengths_gpu_tensor: Tensor,
        detokenize_segments: bool,
        skip_special_tokens: bool = True,
    ) -> tuple[str, list[list[str]] | None]:
        """Return the text of tokens [s], and with ``detokenize_segments`` that of each token.

        ``lengths_gpu_tensor``: number of tokens to read.  End-of-document tokens are text only
        without ``skip_special_tokens``.
        """
        tokens = tokens_gpu_tensor.flatten().tolist()[
            : int(torch.as_tensor(lengths_gpu_tensor).max())
        ]
        if skip_special_tokens:
            ends = {getattr(self.tokenizer, role, None) for role in ("eod", "eos_id")}
            tokens = [token for token in tokens if token not in ends]
        text = self.tokenizer.detokenize(tokens)
        return text, [token_texts(self.tokenizer, tokens)] if detokenize_segments else None

    # ---- generation ----------------------------------------------------------------------------

    def generate_all_output_tokens_static_batch(
        self,
        active_requests: OrderedDict[int, InferenceRequest],
        active_streams: OrderedDict[int, AsyncStream] | None = None,
    ) -> OrderedDict[int, InferenceRequest]:
        """Generate for all requests and return them, with their results set.

        Each request has its own ``sampling_params``.  Streams get a request with its text so far
        after each of its tokens.  Collective over the ranks of a model, which all pass the same
        requests and get the same results.
        """
        streams = active_streams or OrderedDict()
        engine = self.static_engine()
        answers: dict[str, Answer] = {}
        try:
            for request in active_requests.values():
                answer = self.start_answer(request, engine)
                answers[answer.name] = answer
        except MegatronError:
            for name in answers:
                engine.abort(name)
            raise
        while engine.has_unfinished:
            for timed in engine.advance(to_end=not streams):
                answer = answers[timed.output.request_id]
                answer.record(timed)
                stream = streams.get(answer.request.request_id)
                if stream is not None and timed.output.new:
                    stream.put(answer.snapshot())
        for answer in answers.values():
            answer.write_results()
            stream = streams.get(answer.request.request_id)
            if stream is not None:
                stream.finish()
        return active_requests

    def start_answer(self, request: InferenceRequest, engine: CollectiveEngine) -> Answer:
        """Queue a request at ``engine``; return the answer to record its outputs in."""
        params = request.sampling_params or SamplingParams()
        if request.prompt_tokens is None:
            request.prompt_tokens = self.tokenize_prompt(request.prompt)
        # From torch's generator, so that a script that seeds torch repeats its texts.
        seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
        has_top = params.return_prompt_top_n_logprobs and params.top_n_logprobs > 0
        asked = replace(
            params,
            seed=seed,
            return_prompt_log_probs=params.return_log_probs
            or params.return_prompt_log_probs
            or has_top,
        )
        prompt, images = self.prompt_rows(request)
        source: list[int] = []
        start = engine.model.decoder_start
        if start is not None:
            source = self.source_tokens(request)
            prompt = prompt or [start]
        name = str(request.request_id)
        engine.add(Request(name, prompt, asked, source=source, images=images))
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        return Answer(request, params, self.tokenizer, engine.model.eod, text_of(prompt))

    def prompt_rows(self, request: InferenceRequest) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of a tokenized prompt, and its images: none."""
        assert request.prompt_tokens is not None, "start_answer() sets them"
        return [int(token) for token in request.prompt_tokens], ()

    def source_tokens(self, request: InferenceRequest) -> list[int]:
        """Return the tokens that an encoder reads.  Raises ConfigError: this model has none."""
        raise ConfigError("the model has an encoder: use EncoderDecoderTextGenerationController")

    def generate_output_tokens_dynamic_batch(
        self, sampling_params: SamplingParams, termination_id: int
    ) -> None:
        """Raise ConfigError: the steps of a dynamic batch belong to the engine."""
        raise ConfigError(
            "generate_output_tokens_dynamic_batch: call DynamicInferenceEngine.step()"
        )

    def static_engine(self) -> CollectiveEngine:
        """Return the engine for static batches; the first call is collective over all ranks."""
        if self._engine is None or self._engine.options.max_requests != self.max_requests:
            config = self.inference_wrapped_model.inference_wrapper_config
            model = self.inference_wrapped_model.generation_model(self.tokenizer)
            self._engine = CollectiveEngine(
                model,
                EngineOptions(
                    buffer_bytes=_ENDLESS,  # the requests and their lengths bound the cache
                    max_requests=self.max_requests,
                    max_sequence_length=config.inference_max_seq_length,
                    max_waiting=_ENDLESS,
                ),
            )
        return self._engine

    # ---- single steps, for scripts with a loop of their own --------------------------------------

    def sample_from_logits(
        self,
        last_token_logits: Tensor,
        sampling_params: SamplingParams | None = None,
        vocab_size: int | None = None,
        generation_started: Tensor | None = None,
        top_n_logprobs_dict: dict[int, list[dict[str, float]]] | None = None,
        logits: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return one token [b] for each row of logits [b, v]; ``vocab_size``: without padding.

        ``top_n_logprobs_dict`` gets the ``top_n_logprobs`` most likely tokens of each row whose
        ``generation_started`` is True.
        """
        params = sampling_params or kwargs.get("common_inference_params") or SamplingParams()
        if params.top_n_logprobs and top_n_logprobs_dict is not None:
            values, tokens = last_token_logits.float().log_softmax(-1).topk(params.top_n_logprobs)
            for row in range(len(values)):
                if generation_started is None or generation_started[row]:
                    texts = [self.tokenizer.detokenize([token]) for token in tokens[row].tolist()]
                    found = dict(zip(texts, values[row].tolist(), strict=True))
                    top_n_logprobs_dict.setdefault(row, []).append(found)
        return sample_tokens(last_token_logits[:, :vocab_size], params)

    def update_generation_status(
        self,
        updated_prompts_tokens: Tensor,
        generation_started: Tensor,
        current_context_end_position: int,
        is_generation_done_tensor: Tensor,
        generated_sequence_lengths: Tensor,
        termination_id: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return which sequences are done, and their lengths, after a token at a position.

        The token that ends a sequence does not count.
        """
        if termination_id is None:
            termination_id = self.inference_wrapped_model.generation_model(self.tokenizer).eod
        ends = updated_prompts_tokens[:, current_context_end_position] == termination_id
        done = is_generation_done_tensor.bool() | (ends & generation_started)
        lengths = generated_sequence_lengths + (~done & generation_started)
        return done, lengths

    def pad_input_prompt_tokens(
        self,
        batch_prompt_tokens_list: list[list[int]],
        padded_batch_size: int,
        padded_sequence_length: int,
    ) -> Tensor:
        """Return prompts as one tensor [b, s], padded with the tokenizer's EOD."""
        fill = self.tokenizer.eod
        rows = [p + [fill] * (padded_sequence_length - len(p)) for p in batch_prompt_tokens_list]
        rows += [[fill] * padded_sequence_length] * (padded_batch_size - len(rows))
        return torch.tensor(rows)

    def unpad_input_prompt_tokens(
        self, padded_batch_prompt_tokens: Tensor, original_batch_size: int
    ) -> Tensor:
        """Return the rows that are no padding."""
        return padded_batch_prompt_tokens[:original_batch_size]

    def prep_inference_input(
        self,
        prompts_tokens: Tensor,
        active_requests: OrderedDict[int, InferenceRequest],
        use_attention_mask: bool = False,
    ) -> dict[str, Any]:
        """Return the input of the wrapper's `get_batch_for_context_window`."""
        return self.inference_wrapped_model.prep_inference_input(prompts_tokens)

    def stream_tokens(
        self,
        sampling_params: SamplingParams,
        request_ids: list[int],
        requests: list[InferenceRequest],
        streams: list[AsyncStream],
        generation_started: list[bool],
        is_generation_done: list[bool],
        tokens: Tensor,
        prompt_lengths: list[int],
        generated_lengths: list[int],
        output_log_probs: Tensor | None,
    ) -> None:
        """Raise ConfigError: the engine fills the streams."""
        raise ConfigError(
            "stream_tokens: pass active_streams to generate_all_output_tokens_static_batch()"
        )
