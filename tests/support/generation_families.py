"""Tiny random models of 28 families, and the greedy tokens that `transformers` generates with them.

Logits are spread so that a step is decided by much more than the rounding of fp32, and texts do not
repeat one token: `Reference.generate` asserts both.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from megatron.training.conversion.convert import ConversionRequest, convert
from tests.support import hugging_face_models as models
from tests.support.tokenizer_files import write_bpe

tokenizers = pytest.importorskip("tokenizers")

PAGE = 16  # tokens of a page on a CPU
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 150)  # of the prompts
NUM_TOKENS = 64
LOG_PROB_TOLERANCE = 1e-4
_MARGIN = 1e-3  # least distance of the two best logits, a hundred times the rounding of fp32
_SPREAD = 4.0  # standard deviation of the logits

_SIZE = {"max_position_embeddings": 256, "num_hidden_layers": 2}
_WINDOW = {**_SIZE, "sliding_window": 20}  # crosses a page border
_GEMMA3 = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """``case`` of `models.make` with ``changes``; ``flags`` are those of generation, dest -> value.

    ``seed`` of the prompts, chosen such that no step has a tie.
    """

    case: str
    changes: dict[str, Any]
    seed: int = 0
    flags: tuple[tuple[str, object], ...] = ()
    has_experts: bool = False


FAMILIES = {
    "gpt2": Family("gpt2", {"n_positions": 256, "n_layer": 2}),
    "llama3": Family(
        "llama 3, tied", {"num_hidden_layers": 2, "tie_word_embeddings": False}, seed=1
    ),
    "qwen2": Family("qwen2, windows", {**_WINDOW, "tie_word_embeddings": True}),
    "qwen3": Family("qwen3", _SIZE, seed=1),
    "gemma2": Family("gemma2", {**_WINDOW, "final_logit_softcapping": 30.0}),
    "gemma3": Family("gemma3", _GEMMA3),
    # Texts outgrow the short frequencies after 64 tokens: a prompt of 150, others on the way.
    "phi3": Family(
        "phi3",
        {
            **_WINDOW,
            "original_max_position_embeddings": 64,
            "rope_parameters": {**models.LONG, "factor": 256 / 64},
        },
        seed=1,
    ),
    "olmo2": Family("olmo2", _SIZE),
    "mixtral": Family("mixtral", _WINDOW, has_experts=True),
    "qwen3-moe": Family("qwen3 moe", _SIZE, has_experts=True),
    "qwen3-next": Family("qwen3-next", _SIZE, seed=8, has_experts=True),
    "deepseek-v3": Family("deepseek v3", _SIZE, has_experts=True),
    "deepseek-v3, latent cache": Family(
        "deepseek v3", _SIZE, flags=(("cache_mla_latents", True),), has_experts=True
    ),
    "gpt-oss": Family("gpt-oss", _WINDOW, has_experts=True),
    "olmo3": Family("olmo3", _WINDOW, seed=1),
    "smollm3": Family("smollm3", _SIZE),
    "exaone4": Family("exaone4", _WINDOW),
    "glm4": Family("glm4", _SIZE),
    "seed-oss": Family("seed-oss", _SIZE),
    "granite": Family("granite", _SIZE),
    "ministral3": Family("ministral3", _SIZE, seed=2),
    "olmoe": Family("olmoe", _SIZE, seed=1, has_experts=True),
    "minimax-m2": Family("minimax m2", _SIZE, has_experts=True),
    "ernie-4.5-moe": Family("ernie 4.5 moe", _SIZE, has_experts=True),
    "hunyuan-moe": Family("hunyuan moe", _SIZE, has_experts=True),
    "glm4-moe": Family("glm4 moe", _SIZE, seed=4, has_experts=True),
    "mistral4": Family("mistral4", _SIZE, has_experts=True),
    "mistral4, latent cache": Family(
        "mistral4", _SIZE, flags=(("cache_mla_latents", True),), has_experts=True
    ),
    "mamba2": Family("mamba2", {}),
    "nemotron-h": Family(
        "nemotron-h", {"max_position_embeddings": 256, "hybrid_override_pattern": "M*M-"}, seed=1
    ),
    "t5": Family("t5 1.1", {"num_layers": 4, "num_decoder_layers": 4, "eos_token_id": None}),
}

Tokens: TypeAlias = list[int]


@dataclass(frozen=True)
class Reference:
    """A converted model, prompts, and for each the tokens of `transformers` with log-probs."""

    family: Family
    folder: Path
    prompts: list[Tokens]
    tokens: list[Tokens]
    log_probs: list[list[float]]

    @staticmethod
    def generate(name: str, folder: Path) -> Reference:
        """Make the model of ``name``, convert it to ``folder`` and generate."""
        family = FAMILIES[name]
        model = models.make(family.case, **family.changes)
        prompts = random_prompts(family.seed)
        spread_logits(model, prompts[-1])
        theirs = folder / "transformers"
        models.transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(theirs)
        if model.config.is_encoder_decoder:  # whose decoder starts with the padding token
            write_tokenizer(theirs)
        ours = folder / "ours"
        request = ConversionRequest(
            source=theirs, target=ours, format="safetensors_dist", verify=False
        )
        with redirect_stdout(io.StringIO()):
            convert(request)
        model.set_attn_implementation("eager")
        answers = [greedy(model, prompt) for prompt in prompts]
        tokens, log_probs = zip(*answers, strict=True)
        variety = sum(len(set(text)) for text in tokens) / len(tokens)
        assert variety > 8, f"degenerate texts, {variety} different tokens: choose another seed"
        has_experts = any("experts" in key for key, _ in model.named_parameters())
        assert has_experts == family.has_experts
        return Reference(family, ours, prompts, list(tokens), list(log_probs))

    def assert_equal(self, found: Sequence[tuple[Tokens, list[float]]]) -> None:
        """Compare the ``found`` tokens and log-probs of each prompt."""
        expected = zip(self.prompts, self.tokens, self.log_probs, strict=True)
        for (prompt, tokens, log_probs), (mine, scores) in zip(expected, found, strict=True):
            what = f"prompt of {len(prompt)} tokens"
            same = sum(a == b for a, b in zip(mine, tokens, strict=False))
            assert mine == tokens, f"{what}: {same} of {len(tokens)} tokens are equal: {mine}"
            apart = max(abs(a - b) for a, b in zip(scores, log_probs, strict=True))
            assert apart <= LOG_PROB_TOLERANCE, f"{what}: log-probs differ by {apart}"


def random_prompts(seed: int) -> list[Tokens]:
    """Return one prompt of each of `LENGTHS`."""
    generator = torch.Generator().manual_seed(seed)
    # Token 0 is left out: it starts T5's decoder and is its padding.
    return [
        torch.randint(1, models.VOCABULARY, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


@torch.no_grad()
def spread_logits(model: Any, prompt: Tokens) -> None:
    """Let context matter, and scale the final norm for logits of standard deviation `_SPREAD`."""
    for name, param in model.named_parameters():
        if param.dim() > 1 and not any(word in name for word in ("embed", "shared", "head")):
            # More of it makes long sums, whose rounding grows in recurrent layers and in T5.
            param.mul_(2 if "backbone" in name or "block" in name else 3)
    (last, *_) = reversed([m for n, m in model.named_modules() if _is_final_norm(n)])
    ids = torch.tensor([prompt])
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    factor = _SPREAD / float(model(ids, **more).logits.std())
    offset = 1.0 if "Gemma" in type(model).__name__ else 0.0  # Gemma stores weight - 1
    last.weight.add_(offset).mul_(factor).sub_(offset)
    if getattr(last, "bias", None) is not None:
        last.bias.mul_(factor)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words that are their ids, with padding 0."""
    words = {str(i): i for i in range(models.VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = models.transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, pad_token="0").save_pretrained(folder)


def write_llama(folder: Path) -> Any:
    """Write a Llama with a BPE tokenizer in Hugging Face's form; return the model.

    Its vocabulary is padded: no padding is the likeliest token, but it counts in probabilities.
    """
    model = models.make(
        "llama 3, tied", vocab_size=608, num_hidden_layers=2, tie_word_embeddings=False
    )
    spread_logits(model, list(range(1, 60)))
    model.get_output_embeddings().weight.data[600:] = 0
    model.save_pretrained(folder)
    file = write_bpe(folder / "bpe") / "tokenizer.json"
    fast = models.transformers.PreTrainedTokenizerFast
    fast(tokenizer_file=str(file), eos_token="<|endoftext|>").save_pretrained(folder)
    return model


def _is_final_norm(name: str) -> bool:
    endings = ("model.norm", "ln_f", "norm_f", "decoder.final_layer_norm")
    return name.endswith(endings)


def greedy(model: Any, prompt: Tokens) -> tuple[Tokens, list[float]]:
    """Return `NUM_TOKENS` tokens that `transformers` generates, and their log-probabilities."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    logits: Tensor = torch.cat(out.logits)
    tokens: Tokens = out.sequences[0, -NUM_TOKENS:].tolist()
    best = logits.topk(2).values
    margin = float((best[:, 0] - best[:, 1]).min())
    assert margin > _MARGIN, f"near tie ({margin}): choose another seed for this family"
    log_probs = logits.float().log_softmax(-1)[range(NUM_TOKENS), tokens]
    return tokens, log_probs.tolist()
