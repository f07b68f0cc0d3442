"""LLaVA under Megatron-LM's names: padding of rows, boundaries, specs of the language model."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal import context_parallel
from megatron.core.models.multimodal.llava_spec import (
    decoder_model_with_local_default_spec,
    decoder_model_with_transformer_engine_default_spec,
)
from megatron.core.params.param_info import info_of
from tests.support.one_process import one_process_groups, tiny_config


@pytest.mark.parametrize(
    ("sizes", "padding"),
    [
        ((13, 1, 1, False), 0),
        ((13, 1, 4, False), 0),  # tensor parallelism alone divides no row
        ((13, 1, 4, True), 3),
        ((13, 2, 1, False), 3),
        ((13, 2, 4, True), 3),
        ((17, 2, 4, True), 15),
        ((16, 2, 4, True), 0),
    ],
)
def test_rows_are_padded_to_equal_parts(sizes: tuple[int, int, int, bool], padding: int) -> None:
    assert context_parallel.get_padding(*sizes) == padding


def test_overlapped_communication_has_rows_of_a_fixed_length() -> None:
    assert context_parallel.get_padding(13, 1, 2, True, True, 20) == 7
    assert context_parallel.get_padding(13, 1, 2, False, True, 20) == 0
    with pytest.raises(ConfigError, match="--decoder-tp-comm-overlap without --decoder-seq-length"):
        context_parallel.get_padding(13, 1, 2, True, True)


@pytest.mark.parametrize(("cp", "is_packed", "form"), [(1, True, "sbhd"), (2, False, "thd")])
def test_boundaries_count_padding_apart(cp: int, is_packed: bool, form: str) -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    found = context_parallel.get_packed_seq_params(tokens, 4, 1, cp, is_packed)
    assert found.qkv_format == form
    assert found.cu_seqlens_q is not None
    assert found.cu_seqlens_q.tolist() == [0, 8, 16]
    padded = None if found.cu_seqlens_q_padded is None else found.cu_seqlens_q_padded.tolist()
    assert padded == (None if cp == 1 else [0, 9, 18])
    assert found.max_seqlen_q == found.max_seqlen_kv == 9


def test_rows_without_padding_need_no_second_boundaries() -> None:
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    for is_packed, form in ((False, "sbhd"), (True, "thd")):
        found = context_parallel.get_packed_seq_params(tokens, 3, 0, 2, is_packed)
        assert found.qkv_format == form


def test_the_language_model_has_the_layers_of_gpt() -> None:
    specs = (
        get_gpt_layer_local_spec(qk_layernorm=True),
        decoder_model_with_local_default_spec(qk_layernorm=True),
        decoder_model_with_transformer_engine_default_spec(qk_layernorm=True),
    )
    models = [
        GPTModel(tiny_config(), spec, 16, 8, pg_collection=one_process_groups()) for spec in specs
    ]
    # Names by which checkpoints know the parameters; fused norms have other local names.
    wanted, *found = ({info_of(p).name for p in model.parameters()} for model in models)
    assert found == [wanted, wanted]
    assert any("q_layernorm" in name for name in wanted)
