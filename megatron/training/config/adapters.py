"""Flags of low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option
from megatron.core.peft.lora import ALL_LINEAR, LoraConfig
from megatron.core.tensor_parallel.frozen_weight import FORMATS

_adapters = partial(option, group="adapters")


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig:
    lora_rank: int | None = _adapters(
        None,
        "Train low-rank adapters (LoRA) of this rank and freeze the model. Checkpoints then hold "
        "the adapters alone.",
        at_least=1,
    )
    lora_alpha: float | None = _adapters(
        None,
        "Scale of the adapters: their output is multiplied by alpha / rank; --lora-rank if not "
        "given.",
    )
    lora_dropout: float = _adapters(
        0.0, "Dropout probability of the adapters' inputs.", at_least=0, at_most=1
    )
    lora_target_modules: tuple[str, ...] = _adapters(
        (ALL_LINEAR,),
        "Layers with adapters: names of this program (linear_qkv linear_proj linear_fc1 linear_fc2 "
        "word_embeddings output_layer ...), names of PEFT (q_proj down_proj lm_head ...), or "
        "all-linear, which is every linear layer but the output layer.",
        nargs="+",
    )
    lora_use_rslora: bool = _adapters(
        False, "Multiply the adapters' output by alpha / sqrt(rank) instead of alpha / rank."
    )

    lora_base_dtype: str | None = _adapters(
        None,
        "Store the frozen weights of linear layers, but the output layer's, in this format once "
        "they are loaded; they are multiplied in the precision of the run. Default: that of the "
        "run.",
        choices=FORMATS,
    )

    @property
    def lora(self) -> LoraConfig | None:
        """Settings of the adapters; None without --lora-rank."""
        if self.lora_rank is None:
            return None
        return LoraConfig(
            rank=self.lora_rank,
            alpha=self.lora_rank if self.lora_alpha is None else self.lora_alpha,
            dropout=self.lora_dropout,
            targets=self.lora_target_modules,
            use_rslora=self.lora_use_rslora,
        )
