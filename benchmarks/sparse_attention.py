"""Compare a layer of DeepSeek Sparse Attention with that of transformers.

    python -m benchmarks.sparse_attention [--rounds 9] [--tokens 2048] [--topk 512]

Forward and backward of one sequence in fp32, in one thread, with the same weights; outputs must
agree.  Heads have the widths of DeepSeek-V3.2, with half as many index heads; the indexer has no
loss, as transformers computes none.  transformers attends by its fastest implementation on a CPU,
sdpa.  Contenders alternate in one process that keeps freed memory; results are medians of CPU
time.  Dated results are in models.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.linear_attention import compare, step
from megatron.core import device
from megatron.core.device import cpu_tuning
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.gpt.gpt_layer_specs import LOCAL, layer_of
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, HEADS, LATENT = 512, 8, 512
NAMES = {
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
    "core_attention.indexer.linear_wq_b": "indexer.wq_b",
    "core_attention.indexer.linear_wk": "indexer.wk",
    "core_attention.indexer.linear_weights_proj": "indexer.weights_proj",
    "core_attention.indexer.k_norm": "indexer.k_norm",
}


def layers(tokens: int, topk: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Build both layers with the same weights; return their forward passes, [1, s, h] -> same."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32

    torch.manual_seed(1)
    config: Any = v32.DeepseekV32Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=1,
        q_lora_rank=LATENT,
        kv_lora_rank=LATENT,
        index_topk=topk,
        index_n_heads=HEADS // 2,
    )
    config._attn_implementation = "sdpa"
    theirs = v32.DeepseekV32Attention(config, 0)
    own = TransformerConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_layers=1,
        multi_latent_attention=True,
        q_lora_rank=LATENT,
        kv_lora_rank=LATENT,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        attention_dropout=0.0,
        masked_softmax_fusion=True,  # as on the command line
        apply_rope_fusion=True,
        experimental_attention_variant="dsa",
        dsa_indexer_topk=topk,
        dsa_indexer_n_heads=HEADS // 2,
    )
    ours = build_module(
        layer_of(LOCAL, config=own).submodules.self_attention,
        config=own,
        layer_number=1,
        offered={"pg_collection": create_process_groups(*make_grids(1))},
    )
    values = theirs.state_dict()
    with torch.no_grad():
        for name, theirs_name in NAMES.items():
            for kind, param in ours.get_submodule(name).named_parameters():
                param.copy_(values[f"{theirs_name}.{kind}"])
    places = torch.arange(tokens).unsqueeze(0)
    cos, sin = v32.DeepseekV32RotaryEmbedding(config)(torch.zeros(1), places)
    half = cos.shape[-1] // 2
    table = RotaryTable(*(x[0, :, None, None, :half] for x in (cos, sin)), interleaved=True)
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    return {
        "ours": lambda x: ours(x.transpose(0, 1), rotary_pos_emb=table)[0].transpose(0, 1),
        "theirs": lambda x: theirs(x, (cos, sin), mask)[0],
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--topk", type=int, default=512)
    args = parser.parse_args()
    device.choose("cpu")
    torch.set_num_threads(1)
    cpu_tuning.keep_freed_memory()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, {args.tokens} tokens, {args.topk} keys, {HEADS} heads")
    print("| | tokens/s | transformers / ours | apart |\n|---|---|---|---|")
    x = torch.randn(1, args.tokens, HIDDEN)
    steps = {name: step(run, x) for name, run in layers(args.tokens, args.topk).items()}
    compare("layer", steps, args.rounds, args.tokens)


if __name__ == "__main__":
    main()
