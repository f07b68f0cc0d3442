"""Flags of what is trained on a frozen model: low-rank adapters (LoRA) and draft heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option
from megatron.core.peft.lora import ALL_LINEAR, SAVED_MODULES, LoraConfig
from megatron.core.tensor_parallel.frozen_weight import FORMATS

EAGLE_3 = "eagle3"
MTP = "eagle-mtp"
# Flags (dests) of draft heads for which 0 is the same as their absence; and all.
HEAD_SIZES = (
    "export_num_medusa_heads",
    "export_num_eagle_layers",
    "export_num_mtp",
    "export_draft_vocab_size",
    "export_eagle_ffn_hidden_size",
)
HEADS = (*HEAD_SIZES, "export_eagle_algorithm", "export_freeze_mtp")
_adapters = partial(option, group="adapters")
_heads = partial(option, group="ModelOpt")


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
    lora_use_dora: bool = _adapters(
        False,
        "Train a magnitude of each output row too (DoRA): the rows of weight and adapter together "
        "are normalized and multiplied by it. Not for embeddings and experts.",
    )
    lora_modules_to_save: tuple[str, ...] = _adapters(
        (),
        "Modules that are trained completely, and saved with the adapters: "
        + " ".join(SAVED_MODULES)
        + ".",
        nargs="*",
    )

    lora_base_dtype: str | None = _adapters(
        None,
        "Store the frozen weights of linear layers, but the output layer's, in this format once "
        "they are loaded; they are multiplied in the precision of the run. Default: that of the "
        "run.",
        choices=FORMATS,
    )

    export_num_medusa_heads: int | None = _heads(
        None,
        "Freeze the model and train so many Medusa heads: head k predicts the token k + 1 "
        "positions ahead; --inference-draft-model heads uses them. Checkpoints hold them alone.",
        at_least=0,
    )
    export_num_eagle_layers: int | None = _heads(
        None,
        "Freeze the model and train a draft head of so many layers: 1 with "
        "--export-eagle-algorithm eagle3, any number with eagle-mtp.",
        at_least=0,
    )
    export_eagle_algorithm: str = _heads(
        MTP,
        "Draft head of --export-num-eagle-layers: a layer that reads three layers of the model "
        "(eagle3), or layers for multi-token prediction (eagle-mtp).",
        choices=(EAGLE_3, MTP, "eagle1"),
        refused_values={
            "eagle1": "EAGLE-1 reads one layer of the model and accepts fewer tokens; use eagle3"
        },
    )
    export_draft_vocab_size: int | None = _heads(
        None,
        "Number of tokens that EAGLE-3 can draft, the most frequent ones of "
        "--export-draft-vocab-data or those with the lowest ids; default: all of them.",
        at_least=0,
    )
    export_draft_vocab_data: tuple[str, ...] = _heads(
        (),
        "Prefixes of token files, as of --data-path, whose first 2^24 tokens each are counted to "
        "choose the tokens of --export-draft-vocab-size.",
        nargs="*",
    )
    export_eagle_ffn_hidden_size: int | None = _heads(
        None, "Width of the MLP of EAGLE-3; default: that of the model.", at_least=0
    )
    export_num_mtp: int | None = _heads(
        None,
        "Freeze the model and train so many layers for multi-token prediction; layers that the "
        "model has start with its weights.",
        at_least=0,
    )
    freeze_base_for_mtp: bool = _heads(
        False, "Freeze the model and train its --mtp-num-layers alone, like --export-num-mtp."
    )
    export_freeze_mtp: tuple[int, ...] = _heads(
        (), "Layers for multi-token prediction, from 0, that are not trained either.", nargs="*"
    )

    @property
    def has_eagle(self) -> bool:
        """Whether a layer of EAGLE-3 is trained."""
        return bool(self.export_num_eagle_layers) and self.export_eagle_algorithm == EAGLE_3

    @property
    def has_heads(self) -> bool:
        """Whether the model is frozen, and draft heads or layers of MTP are trained."""
        return bool(
            self.export_num_medusa_heads or self.export_num_eagle_layers or self.export_num_mtp
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
            use_dora=self.lora_use_dora,
            modules_to_save=self.lora_modules_to_save,
        )
