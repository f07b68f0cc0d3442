"""BERT as Megatron-LM orders it: norms before attention and MLP, and one behind the last layer."""

from __future__ import annotations

from megatron.training.conversion.families.bert import (
    ALWAYS,
    COMMON,
    FIELDS,
    LAYER,
    OUTSIDE,
    both,
    types,
)
from megatron.training.conversion.family import Family

FAMILY = Family(
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    always=ALWAYS,
    fields=(*FIELDS, types("MegatronBertForPreTraining", "MegatronBertForMaskedLM")),
    layer={
        **both("input_layernorm", "attention.ln"),
        **LAYER,
        **both("pre_mlp_layernorm", "ln"),
    },
    **{**COMMON, "outside": {**OUTSIDE, **both("encoder.final_layernorm", "bert.encoder.ln")}},
)
