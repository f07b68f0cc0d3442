"""Descriptions of the built-in model kinds; each implementation is imported on first use."""

from __future__ import annotations

from dataclasses import replace

from megatron.training.config.run import DPO, GRPO, REWARD, SFT
from megatron.training.models.kind import ModelKind
from megatron.training.models.layers import encoder_decoder_layers, hybrid_layers

GPT = ModelKind(
    title="GPT",
    entry_script="pretrain_gpt.py",
    implementation="megatron.training.models.gpt:GPT",
    objectives=frozenset({GRPO, SFT, DPO, REWARD}),
    supports_compile=True,
)
BERT = ModelKind(
    title="BERT",
    entry_script="pretrain_bert.py",
    implementation="megatron.training.models.bert:BERT",
    is_causal=False,
    masks_tokens=True,
    has_masked_lm_head=True,
    writes_text=False,
    supports_context_parallel=False,
    transformers_class="MaskedLM",
)
T5 = ModelKind(
    title="T5",
    entry_script="pretrain_t5.py",
    implementation="megatron.training.models.t5:T5",
    has_encoder=True,
    masks_tokens=True,
    supports_context_parallel=False,
    transformers_class="Seq2SeqLM",
    layers=encoder_decoder_layers,
)
MAMBA = ModelKind(
    title="Mamba",
    entry_script="pretrain_mamba.py",
    implementation="megatron.training.models.mamba:MAMBA",
    is_hybrid=True,
    layers=hybrid_layers,
)
VIT = ModelKind(
    title="the image classifier",
    entry_script="pretrain_vision_classify.py",
    implementation="megatron.training.models.vit:VIT",
    is_causal=False,
    classifies_images=True,
    writes_text=False,
    supports_context_parallel=False,
    transformers_class="ImageClassification",
)
VLM = ModelKind(
    title="the vision-language model",
    entry_script="pretrain_vlm.py",
    implementation="megatron.training.models.vlm:VLM",
    reads_images=True,
    transformers_class="ImageTextToText",
)
MIMO = replace(
    VLM,
    title="the MiMo model",
    entry_script="examples/mimo/train.py",
    implementation="megatron.training.models.mimo:MIMO",
    has_placeholders=True,
)
