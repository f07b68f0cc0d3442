"""Answers to a few prompts during training (--eval-generate), by the engine of generation.

The engine has the layout of training and shares its weights.  Answers are greedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.errors import DataError
from megatron.core.datasets.conversations import messages_of, open_rows, read_all, tools_of
from megatron.core.distributed.distributed_data_parallel_config import is_fully_sharded
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.engine_flags import GenerationLayout
from megatron.inference.generation import TrainingEngine, open_engine
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.chat import ChatTemplate
from megatron.training.tokenizer.sft_tokenizer import chat_template_of

_BUFFER_BYTES = 2**28  # of keys and values, which stay allocated during training


class EvalGenerate(Callback):
    """Print answers to the prompts of a file at each evaluation.  Collective over all ranks."""

    def __init__(self) -> None:
        self._prompts: list[tuple[list[int], str]] = []  # tokens, and the text that is printed
        self._stop_ids: tuple[int, ...] = ()
        self._engine: TrainingEngine | None = None
        self._generated_at = -1

    def on_train_start(self, run: TrainingRun) -> None:
        """Read the prompts, so that a wrong file ends the run before the first step."""
        path = run.config.validation.eval_generate
        assert path is not None, "default_callbacks() adds this callback with a file"
        chat = chat_template_of(run.tokenizer, run.config.tokenizer)
        longest = run.config.data.seq_length - run.config.validation.eval_generate_tokens
        self._prompts = read_all(
            open_rows(path),
            lambda row: prompt_of(row, run.tokenizer, chat, longest),
            "prompts of --eval-generate",
        )
        if not self._prompts:
            raise DataError(
                f"--eval-generate {path} has no rows: give messages or a prompt in each"
            )
        self._stop_ids = () if chat is None else chat.stop_ids()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration % run.config.validation.eval_interval == 0:
            self._generate(run)

    def on_train_end(self, run: TrainingRun) -> None:
        self._generate(run)

    def _generate(self, run: TrainingRun) -> None:
        if self._generated_at == run.state.iteration:
            return
        self._generated_at = run.state.iteration
        with run.callbacks.paused(run, "evaluation"):
            if self._engine is None:
                self._engine = _engine_of(run, len(self._prompts))
            self._engine.update()
            engine = self._engine.writer.engine
            if not run.is_rank_0:
                engine.follow()
                return
            params = SamplingParams(
                temperature=0.0,
                num_tokens_to_generate=run.config.validation.eval_generate_tokens,
                stop_token_ids=self._stop_ids,
            )
            answers: list[list[int]] = [[] for _ in self._prompts]
            for output in engine.run_to_end(
                Request(str(i), tokens, params) for i, (tokens, _) in enumerate(self._prompts)
            ):
                answers[int(output.request_id)] += [token.token for token in output.new]
                if output.finish_reason == "error":
                    raise DataError(f"--eval-generate, prompt {output.request_id}: {output.error}")
            engine.close()
        for i, ((_, prompt), answer) in enumerate(zip(self._prompts, answers, strict=True), 1):
            text = run.tokenizer.detokenize(answer)
            print(
                f"prompt {i} of {len(self._prompts)} at iteration {run.state.iteration}: "
                f"{prompt}\nanswer {i}: {text}",
                flush=True,
            )


def prompt_of(
    row: Mapping[str, Any], tokenizer: MegatronTokenizer, chat: ChatTemplate | None, longest: int
) -> tuple[list[int], str]:
    """Return tokens and text of the prompt of ``row``, a conversation without its last answer.

    Raises DataError for a wrong row, and a prompt of more than ``longest`` tokens.
    """
    name = "messages" if "messages" in row else "prompt"
    found = row.get(name)
    if isinstance(found, str):
        tokens = tokenizer.tokenize(found)
        text = found
    else:
        messages = messages_of(found, name)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise DataError("no message precedes the answer")
        if chat is None:
            raise DataError("messages need a chat template; give --chat-template")
        tokens = chat.encode_prompt(messages, tools_of(row)).tolist()
        text = str(messages[-1]["content"])
    if not 0 < len(tokens) <= longest:
        raise DataError(
            f"the prompt has {len(tokens)} tokens: give 1 to {longest}, so that --seq-length has "
            "room for --eval-generate-tokens"
        )
    return tokens, text


def _engine_of(run: TrainingRun, num_prompts: int) -> TrainingEngine:
    m = run.config.model
    layout = GenerationLayout(
        tensor=m.tensor_model_parallel_size,
        pipeline=m.pipeline_model_parallel_size,
        expert=m.expert_model_parallel_size,
        expert_tensor=m.expert_tensor_parallel_size,
    )
    options = EngineOptions(
        buffer_bytes=_BUFFER_BYTES,
        max_requests=min(num_prompts, 16),
        max_sequence_length=run.config.data.seq_length,
        max_waiting=num_prompts,
        num_cuda_graphs=0,
    )
    shares = not is_fully_sharded(run.config.ddp)
    return open_engine(run, layout=layout, options=options, share_memory=shares)
