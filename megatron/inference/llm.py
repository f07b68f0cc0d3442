"""Generate text from Python:

    from megatron.inference import LLM
    llm = LLM.load("checkpoints/run1")
    for answer in llm.generate(["def main(", "import "]):
        print(answer.text)

Under torchrun every rank runs the same script; rank 0 gets the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import index
from typing import Any, TypeAlias, cast

import numpy as np

from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.request import (
    FinishReason,
    Pooling,
    PromptImage,
    RequestError,
    TokenOutput,
    Vector,
    text_of,
    vector_of,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.generation import open_writer
from megatron.inference.image_prompts import Image, ImagePrompts
from megatron.inference.text import SampleText, TextDelta, TextRules
from megatron.training.initialize import shut_down
from megatron.training.process.rank_print import is_rank0
from megatron.training.tokenizer import MegatronTokenizer
from megatron.training.tokenizer.chat import ChatTemplate, Message, load_chat_template
from megatron.training.tokenizer.multimodal_tokenizer import Turn
from megatron.training.tokenizer.sft_tokenizer import SFTTokenizer


@dataclass(frozen=True)
class PromptWithImages:
    """A text with a tag ``<image>`` for each image, or none: then the images stand before it.

    ``text`` may also be the turns of a conversation, each with role and content.  An image is a
    path, the bytes of a file, or a PIL image.
    """

    text: str | Sequence[Turn]
    images: Sequence[Image]


Prompt: TypeAlias = str | Sequence[int] | PromptWithImages


@dataclass(frozen=True)
class LoRARequest:
    """An adapter to generate with, as in vLLM: its name, a number without effect, its folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str


Adapters: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None


@dataclass
class Answer:
    """The text and tokens that follow a prompt.

    ``tokens`` have the log-probabilities that the parameters ask for.  ``finish_reason``: "stop"
    (an end token or a stop string) or "length".  ``prompt_scores``: of the prompt's tokens after
    the first, if the parameters ask for them.  ``error``: why ``finish_reason`` is "error" (logits
    that are not finite).
    """

    prompt: Prompt
    text: str = ""
    tokens: list[TokenOutput] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_scores: tuple[TokenOutput, ...] = ()
    error: str = ""
    vector: str = ""  # of `LLM.embed`


class LLM:
    """A language model with its tokenizer, ready to generate.

    `load` and `generate` are collective over all ranks.  Only rank 0 gets answers.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: MegatronTokenizer,
        image_prompts: ImagePrompts | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._image_prompts = image_prompts
        self._tokenizer_path = tokenizer_path  # of the chat template
        self._ids = count()
        self._adapter_folders: dict[str, str] = {}  # by name

    @classmethod
    def load(cls, path: str, **options: Any) -> LLM:
        """Load the checkpoint directory ``path``, saved in any layout.

        ``options``: arguments of `open_writer` (layout, engine sizes, device).  Raises
        CheckpointError if there is no checkpoint, ConfigError if the model generates no text,
        LaunchError if the process has another model: `shut_down` that one first.
        """
        writer = open_writer(path, **options)
        files = writer.tokenizer_spec.tokenizer_model
        return cls(writer.engine, writer.tokenizer, writer.image_prompts, files)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        lora_request: Adapters = None,
    ) -> list[Answer]:
        """Return the answer to each prompt, a text or its token ids, in their order.

        A text ends before the first string of ``stop``.  ``lora_request``: an adapter, or one (or
        None) for each prompt; its folder is read at its first use.  Raises RequestError for a
        prompt that is empty or too long, CheckpointError for a folder without adapters.
        """
        answers = [Answer(prompt) for prompt in _listed(prompts)]
        with self._leading() as leads:
            for _ in self._complete(answers, params, stop, lora_request) if leads else ():
                pass
        return answers if leads else []

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        stop: str | Sequence[str] = (),
        lora_request: Adapters = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Return the answer to a conversation, or to each of several.  Collective.

        ``chat_template``: jinja text; default: that of the tokenizer.  ``chat_template_kwargs``:
        its variables.  An answer also ends at the token that ends a turn of the template.  Raises
        ConfigError without a template, DataError if it refuses the messages.
        """
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        template = self._chat_template(chat_template)
        variables = chat_template_kwargs or {}
        prompts = [
            template.encode_prompt(
                cast(Sequence[Message], chat),
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            ).tolist()
            for chat in chats
        ]
        params = params or SamplingParams()
        if not params.ignore_eos:
            ends = dict.fromkeys((*params.stop_token_ids, *template.stop_ids(tools, **variables)))
            params = replace(params, stop_token_ids=tuple(ends))
        return self.generate(prompts, params, stop=stop, lora_request=lora_request)

    def _chat_template(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(self.tokenizer, source, {}, "chat_template")
        if isinstance(self.tokenizer, SFTTokenizer):
            return self.tokenizer.chat
        return load_chat_template(self.tokenizer, None, self._tokenizer_path)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        lora_request: Adapters = None,
    ) -> list[Vector]:
        """Return a vector [h] in float32 for each prompt, on rank 0.  Collective.

        It is the last hidden state, after the final norm, of the last token, or the ``mean`` over
        all tokens, with length 1 if ``normalize``.
        """
        answers = [Answer(prompt) for prompt in _listed(prompts)]
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=1)
        with self._leading() as leads:
            done = self._complete(answers, params, (), lora_request, pooling) if leads else ()
            for _ in done:
                pass
        return [vector_of(a.vector, normalize=normalize) for a in answers] if leads else []

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """Yield the text that follows ``prompt`` in pieces, on rank 0.  Collective."""
        with self._leading() as leads:
            for delta in self._complete([Answer(prompt)], params, stop) if leads else ():
                yield delta.text

    def answers(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        at_once: int = 1,
    ) -> Iterator[Answer]:
        """Yield the answers to ``at_once`` prompts before the next ones are read, on rank 0.

        Collective.
        """
        with self._leading() as leads:
            waiting = iter(prompts if leads else ())
            while answers := [Answer(prompt) for prompt in islice(waiting, at_once)]:
                for _ in self._complete(answers, params, ()):
                    pass
                yield from answers

    def shut_down(self) -> None:
        """Leave the process groups; another model can be loaded then.  Collective."""
        shut_down()

    @contextmanager
    def _leading(self) -> Iterator[bool]:
        """Yield True on rank 0; the other ranks execute its steps until it leaves the block."""
        if not is_rank0():
            self.engine.follow()
            yield False
            return
        try:
            yield True
        finally:
            self.engine.close()

    def _complete(
        self,
        answers: list[Answer],
        params: SamplingParams | None,
        stop: str | Sequence[str],
        adapters: Adapters = None,
        pooling: Pooling | None = None,
    ) -> Iterator[TextDelta]:
        """Complete ``answers`` on rank 0; yield new text and tokens."""
        engine = self.engine
        params = params or SamplingParams()
        unfinished: dict[str, tuple[Answer, SampleText]] = {}
        if not isinstance(adapters, Sequence):
            adapters = [adapters] * len(answers)
        try:
            for answer, adapter in zip(answers, adapters, strict=True):
                request_id = str(next(self._ids))
                text = self._add(request_id, answer.prompt, params, stop, adapter, pooling)
                unfinished[request_id] = answer, text
            while unfinished:
                for output in engine.step():
                    answer, text = unfinished[output.request_id]
                    delta = text.add(output)
                    answer.text += delta.text
                    answer.tokens += [placed.output for placed in delta.tokens]
                    answer.prompt_scores += output.prompt_scores
                    answer.finish_reason = delta.finish_reason
                    answer.error = output.error
                    answer.vector = output.vector
                    if delta.finish_reason is not None:
                        engine.abort(output.request_id)  # at a stop string it still runs
                        del unfinished[output.request_id]
                    yield delta
        finally:  # also after an error, and when the caller does not want the rest
            for request_id in unfinished:
                engine.abort(request_id)

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        stop: str | Sequence[str],
        adapter: LoRARequest | None,
        pooling: Pooling | None,
    ) -> SampleText:
        """Queue a request; return its text."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise RequestError("stop: an empty string ends every text: leave it out", "stop")
        images: tuple[PromptImage, ...] = ()
        if isinstance(prompt, PromptWithImages):
            if self._image_prompts is None:
                raise RequestError("this model reads no images: give a text", "images")
            ids, images = self._image_prompts.prompt(prompt.text, prompt.images)
        else:
            ids = self.tokenizer.tokenize(prompt) if isinstance(prompt, str) else _ids_of(prompt)
        model = self.engine.model
        request = model.request(request_id, ids, params)
        request.images = images
        request.pooling = pooling
        if adapter is not None:
            request.adapter = adapter.lora_name
            if self._adapter_folders.get(adapter.lora_name) != adapter.lora_path:
                self.engine.load_adapter(adapter.lora_name, adapter.lora_path)
                self._adapter_folders[adapter.lora_name] = adapter.lora_path
        self.engine.add(request)
        ends = frozenset((*params.stop_token_ids, *([] if model.eod is None else [model.eod])))
        rules = TextRules(ends, stops, params.min_tokens)
        return SampleText(self.tokenizer.detokenize, rules, [] if request.source else text_of(ids))


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | PromptWithImages):
        return [prompts]
    whole = (str, PromptWithImages)
    are_many = len(prompts) == 0 or isinstance(prompts[0], whole) or np.ndim(prompts[0]) > 0
    return cast(Sequence[Prompt], prompts if are_many else [prompts])


def _ids_of(prompt: Sequence[int]) -> list[int]:
    """Return token ids as Python numbers.  Raises RequestError for anything else."""
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        what = f"prompt {prompt!r:.80}"
        raise RequestError(f"{what}: give a text or a list of token ids") from error
