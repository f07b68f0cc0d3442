"""Contenders of inference.py: each serves a model in its own process, and perhaps environment.

`main` reads one JSON command per line from stdin and answers each with one JSON line: `generate`
for prompts that are submitted together, `serve` for prompts that arrive over time.  One thread
computes, so a command reports CPU time, which other load on the machine hardly changes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

Tokens: TypeAlias = list[int]
MAX_LENGTH = 2304  # tokens of a sequence
MAX_RUNNING = 64
CHUNK = 512  # tokens of a step
CACHE_TOKENS = 24 * 1024


class Contender(Protocol):
    """What every contender can do; greedy, and without an end of text."""

    def generate(self, prompts: list[Tokens], lengths: list[int]) -> list[Tokens]:
        """Return ``lengths[i]`` tokens after ``prompts[i]``."""


class Engine(Contender, Protocol):
    """A contender with an engine that takes requests while it runs."""

    def add(self, name: str, prompt: Tokens, length: int) -> None:
        """Submit a request."""

    def step(self) -> list[str]:
        """Run one forward pass; return the name of a request for each new token."""


class Ours:
    """The engine of this project, with the model that its converter makes."""

    def __init__(self, folder: Path, weights: str = "saved") -> None:
        import torch

        from megatron.core.inference.paged_engine.options import EngineOptions
        from megatron.inference.generation import open_writer

        torch.set_num_threads(1)
        options = EngineOptions(
            max_requests=MAX_RUNNING,
            max_step_tokens=CHUNK,
            buffer_bytes=2 * 2**30,
            weights=weights,
        )
        self.writer = open_writer(converted(folder), device_kind="cpu", options=options)
        self.outputs: Any = []

    def add(self, name: str, prompt: Tokens, length: int) -> None:
        from megatron.core.inference.sampling_params import SamplingParams

        params = SamplingParams(num_tokens_to_generate=length, temperature=0, ignore_eos=True)
        self.writer.engine.add(self.writer.engine.model.request(name, prompt, params))

    def step(self) -> list[str]:
        self.outputs = self.writer.engine.step()
        return [output.request_id for output in self.outputs for _ in output.new]

    def generate(self, prompts: list[Tokens], lengths: list[int]) -> list[Tokens]:
        found: list[Tokens] = [[] for _ in prompts]
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            self.add(str(i), prompt, length)
        while self.writer.engine.has_unfinished:
            self.step()
            for output in self.outputs:
                found[int(output.request_id)] += [item.token for item in output.new]
        return found


class Transformers:
    """`generate` of transformers: one batch of prompts of equal length."""

    def __init__(self, folder: Path) -> None:
        self.model = load_transformers(folder)

    def generate(self, prompts: list[Tokens], lengths: list[int]) -> list[Tokens]:
        import torch

        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=lengths[0],
            min_new_tokens=lengths[0],
            pad_token_id=0,
        )
        tokens: list[Tokens] = out[:, ids.size(1) :].tolist()
        return tokens


class TransformersContinuous:
    """Continuous batching of transformers, with its paged cache."""

    def __init__(self, folder: Path) -> None:
        self.model = load_transformers(folder)

    def generate(self, prompts: list[Tokens], lengths: list[int]) -> list[Tokens]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        general = GenerationConfig(do_sample=False, max_new_tokens=max(lengths), eos_token_id=-1)
        own = ContinuousBatchingConfig(
            page_size=16,
            num_blocks=CACHE_TOKENS // 16,
            max_batch_tokens=CHUNK,
            max_requests_per_batch=MAX_RUNNING,
            use_async_batching=False,
        )
        manager = self.model.continuous_batching_context_manager(
            generation_config=general, continuous_batching_config=own
        )
        found: dict[str, Tokens] = {}
        with manager as running:
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                running.add_request(prompt, request_id=str(i), max_new_tokens=length)
            while len(found) < len(prompts):
                result = running.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
        return [found[str(i)] for i in range(len(prompts))]


class Vllm:
    """vLLM's CPU build; its engine runs in this process."""

    def __init__(self, folder: Path) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_LENGTH,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=CHUNK,
            enable_chunked_prefill=True,
        )
        self.engine = self.llm.llm_engine
        self._counts: dict[str, int] = {}

    def add(self, name: str, prompt: Tokens, length: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        self._counts[name] = 0
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[str]:
        names = []
        self.outputs = self.engine.step()
        for output in self.outputs:
            count = len(output.outputs[0].token_ids)
            names += [output.request_id] * (count - self._counts[output.request_id])
            self._counts[output.request_id] = count
        return names

    def generate(self, prompts: list[Tokens], lengths: list[int]) -> list[Tokens]:
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            self.add(str(i), prompt, length)
        found = {}
        while len(found) < len(prompts):
            self.step()
            found |= {o.request_id: o.outputs[0].token_ids for o in self.outputs if o.finished}
        return [list(found[str(i)]) for i in range(len(prompts))]


def load_transformers(folder: Path) -> Any:
    """Return the model of transformers with its fastest attention on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def converted(folder: Path) -> str:
    """Return the folder of the checkpoint that this project's converter writes."""
    from megatron.training.conversion.convert import ConversionRequest, convert

    target = folder / "megatron"
    if not target.exists():
        request = ConversionRequest(
            source=folder, target=target, format="safetensors_dist", verify=False
        )
        convert(request)
    return str(target)


CONTENDERS: dict[str, Callable[[Path], Contender]] = {
    "ours": Ours,
    "ours-bf16": partial(Ours, weights="bf16"),
    "ours-int8": partial(Ours, weights="int8"),
    "transformers": Transformers,
    "transformers-continuous": TransformersContinuous,
    "vllm": Vllm,
}


def generate(contender: Contender, prompts: list[Tokens], lengths: list[int]) -> dict[str, Any]:
    """Generate for prompts that are submitted together; return time and tokens."""
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    tokens = contender.generate(prompts, lengths)
    cpu_s = time.process_time() - start_cpu_s
    wall_s = time.perf_counter() - start_s
    assert [len(text) for text in tokens] == lengths, [len(text) for text in tokens]
    return {"cpu_s": cpu_s, "wall_s": wall_s, "tokens": tokens}


def serve(engine: Engine, requests: list[tuple[float, Tokens, int]]) -> dict[str, Any]:
    """Serve requests (arrival in s, prompt, length) on a clock of this process's CPU time.

    Between requests the clock jumps to the next arrival.  Returns the arrival time of each token
    of each request, and start and end of each step.
    """
    waiting = sorted(enumerate(requests), key=lambda item: item[1][0])
    times: list[list[float]] = [[] for _ in requests]
    steps = []
    now_s = 0.0
    open_count = 0
    while waiting or open_count:
        if not open_count:
            now_s = max(now_s, waiting[0][1][0])
        start_s = now_s
        start_cpu_s = time.process_time()
        while waiting and waiting[0][1][0] <= now_s:
            i, (_, prompt, length) = waiting.pop(0)
            engine.add(f"{i}", prompt, length)
            open_count += 1
        names = engine.step()
        now_s += time.process_time() - start_cpu_s
        steps.append((start_s, now_s))
        for name in names:
            times[int(name)].append(now_s)
            open_count -= len(times[int(name)]) == requests[int(name)][2]
    return {"times_s": times, "steps_s": steps}


def main() -> None:
    """Load the contender argv[1] with the Hugging Face folder argv[2]; answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # programs print to stdout
    contender: Any = CONTENDERS[sys.argv[1]](Path(sys.argv[2]))
    commands: dict[str, Callable[..., dict[str, Any]]] = {"generate": generate, "serve": serve}
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = commands[command.pop("do")](contender, **command)
        print(json.dumps(answer), file=answers, flush=True)
