"""Tiny Hugging Face models for tools/dev/library_projects.py: made here, with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 128
SEQUENCE = 16
LR = 1e-3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
# Name of a model -> fields of its config besides `_COMMON`.
_GROUPED = "_grouped"  # end of the name of a model whose experts are chosen by groups
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "deepseek_v3": {
        **_EXPERTS,
        "scoring_func": "sigmoid",  # as in the released models; bridges read it
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,  # mbridge leaves groups out
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
MODELS[f"deepseek_v3{_GROUPED}"] = {**MODELS["deepseek_v3"], "n_group": 2}


def make(name: str, folder: Path) -> Path:
    """Write a checkpoint of model ``name`` with a tokenizer, and return its folder."""
    torch.manual_seed(0)
    kind = name.removesuffix(_GROUPED)
    config = AutoConfig.for_model(kind, **{**_COMMON, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():  # norms and biases that are not all ones and zeros
        for key, parameter in model.named_parameters():
            if "norm" in key or "bias" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            if key.endswith("gate.weight"):  # scores that rounding to bf16 does not reorder
                parameter.mul_(10)
    path = folder / name
    model.save_pretrained(path, max_shard_size="300KB")  # in parts with an index, as releases
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype in which bridges accept model ``name``."""
    return torch.bfloat16 if name.startswith("deepseek_v3") else torch.float32


def tokens(batch: int = 2) -> Tensor:
    """Return token ids [b, s], the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (batch, SEQUENCE), generator=generator)


class Reference:
    """The model of transformers, trained with torch's AdamW: what a project must reproduce."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model.train()
        betas = (0.9, 0.999)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=betas, eps=1e-8, weight_decay=0.0
        )

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits [b, s, v]."""
        with torch.no_grad():
            found: Tensor = self.model(ids).logits.float()
        return found

    def step(self, ids: Tensor) -> tuple[float, float]:
        """Train on the next tokens of ``ids``; return the loss and the norm of the gradient."""
        self.optimizer.zero_grad()
        logits = self.model(ids).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), torch.inf)
        self.optimizer.step()
        return loss.item(), norm.item()


def differing(path: Path, exported: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in any bit from those of the checkpoint."""
    found = dict(exported)
    different = []
    for part in path.glob("*.safetensors"):
        for name, tensor in load_file(part).items():
            other = found.pop(name, None)
            if other is None or not torch.equal(other, tensor.to(other.dtype)):
                different.append(name)
    return different + sorted(found)


def main() -> None:
    """Write the checkpoints: FOLDER MODEL..."""
    for name in sys.argv[2:]:
        make(name, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
