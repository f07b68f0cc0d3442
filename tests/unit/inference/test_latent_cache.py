"""Generation with latent attention: what is kept, and that it is enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

LENGTH = 16
MLA = {
    "multi_latent_attention": True, "qk_layernorm": True, "add_bias_linear": False,
    "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
    "rotary_scaling_factor": 4.0, "params_dtype": torch.float64, "init_method_std": 0.3,
}  # fmt: skip


def written(rank: int, size: int, keeps_latents: bool, lora: int | None) -> tuple[Tensor, int]:
    """Logits of tokens that come bit by bit, and the bytes of the cache; on ``size`` tp ranks."""
    torch.manual_seed(2)
    groups = one_process_groups()
    if size > 1:
        groups = create_process_groups(*make_grids(size, tp=size))
    config = tiny_config(**MLA, cache_mla_latents=keeps_latents, q_lora_rank=lora)
    spec = get_gpt_layer_local_spec(config=config)
    model = GPTModel(
        config, spec, 64, LENGTH, position_embedding_type="rope", pg_collection=groups
    ).eval()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 64
    cache, out, start = StaticInferenceContext(2, LENGTH), [], 0
    with torch.no_grad():
        for count in (6, 1, 1, 3, 1):
            part = slice(start, start + count)
            positions = torch.arange(LENGTH)[part].expand(2, count)
            out.append(model(ids[:, part], positions, None, inference_context=cache))
            cache.increment_sequence_len_offset(count)
            start += count
    kept = cache._cache._layers.values()
    return torch.cat(out, 1), sum(x.nbytes for tensors in kept for x in tensors)


@pytest.mark.feature("Generation: latent attention keeps its latents alone (--cache-mla-latents)")
@pytest.mark.parametrize("lora", [None, 12])
def test_kept_latents_write_what_keys_and_values_write_in_less_memory(lora: int | None) -> None:
    logits, num_bytes = written(0, 1, False, lora)
    found, fewer_bytes = written(0, 1, True, lora)
    torch.testing.assert_close(found, logits, **tolerances.of(torch.float64))
    a_token = 2 * (2 + 1) * 8  # layers, sequences and a spare one, bytes of a value
    assert num_bytes == LENGTH * a_token * 2 * 4 * 12  # keys and values, heads, channels
    assert fewer_bytes == LENGTH * a_token * (8 + 4)
    for logits_of_rank, _ in run_ranks(written, 2, True, lora):
        torch.testing.assert_close(logits_of_rank, logits, **tolerances.of(torch.float64))
