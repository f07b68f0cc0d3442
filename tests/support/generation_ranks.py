"""Generation in ranks.  Without `transformers`, whose import takes longer than the generation."""

from __future__ import annotations

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.generation import GenerationLayout, open_writer
from megatron.inference.llm import LLM


def generate(
    rank: int,
    world_size: int,
    load: str,
    prompts: list[list[int]],
    num_tokens: int,
    layout: GenerationLayout,
    flags: dict[str, object],
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probs that follow each prompt; all prompts share the passes."""
    writer = open_writer(load, device_kind="cpu", layout=layout, flags=flags)
    if rank:
        writer.engine.follow()
        return []
    params = SamplingParams(
        num_tokens_to_generate=num_tokens, top_k=1, ignore_eos=True, return_log_probs=True
    )
    answers = writer.engine.generate(
        writer.engine.model.request(str(i), prompt, params) for i, prompt in enumerate(prompts)
    ).values()
    writer.engine.close()
    return [([t.token for t in text], [t.log_prob for t in text]) for text in answers]


def score(
    rank: int, world_size: int, folder: str, prompts: list[list[int]], layout: GenerationLayout
) -> list[list[float]]:
    """Return the log-probability of each token of ``prompts`` after the first."""
    llm = LLM.load(folder, device_kind="cpu", layout=layout)
    params = SamplingParams(num_tokens_to_generate=1, return_prompt_log_probs=True)
    answers = llm.generate(prompts, params)
    return [[float(token.log_prob or 0.0) for token in a.prompt_scores] for a in answers]
