"""Compare a layer of linear attention (Gated DeltaNet) with that of transformers.

    python -m benchmarks.linear_attention [--rounds 9] [--tokens 2048]

Forward and backward of one sequence in fp32, in one thread, with the same weights; outputs must
agree.  `rule` is the gated delta rule alone, `layer` also has projections, convolution and norm.
transformers computes both by torch, as without flash-linear-attention, which needs a GPU.
Contenders alternate in one process that keeps freed memory; results are medians of CPU time.  Dated
results are in models.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.moe import medians
from megatron.core import device
from megatron.core.device import cpu_tuning
from megatron.core.models.gpt.gpt_layer_specs import LOCAL, decoder_block_of
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.ssm.gated_delta_rule import gated_delta_rule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, KEY_HEADS, VALUE_HEADS = 512, 4, 8  # heads are 128 wide, as in Qwen3-Next


def layers() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Build both layers with the same weights."""
    import transformers
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    transformers.utils.logging.set_verbosity_error()
    heads = {"linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS}
    torch.manual_seed(1)
    config = transformers.Qwen3_5TextConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["linear_attention"], **heads
    )
    theirs = Qwen3_5GatedDeltaNet(config, 0)
    own = TransformerConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_layers=1,
        experimental_attention_variant="gated_delta_net",
        layernorm_epsilon=config.rms_norm_eps,
        **heads,
    )
    (layer,) = decoder_block_of(LOCAL, own).layer_specs or ()
    ours = build_module(
        layer.submodules.self_attention,
        config=own,
        layer_number=1,
        offered={"pg_collection": create_process_groups(*make_grids(1))},
    )
    values = dict(theirs.named_parameters())
    with torch.no_grad():
        theirs.A_log.uniform_(-1, 2.5)
        theirs.dt_bias.fill_(-3)
        parts = [values[f"in_proj_{kind}.weight"] for kind in ("qkv", "z", "b", "a")]
        ours.in_proj.weight.copy_(torch.cat(parts))
        for name, theirs_name in {"out_norm": "norm", "out_proj": "out_proj"}.items():
            getattr(ours, name).weight.copy_(values[f"{theirs_name}.weight"])
        ours.conv1d.weight.copy_(theirs.conv1d.weight)
        for name in ("A_log", "dt_bias"):
            getattr(ours, name).copy_(values[name])
    return theirs, ours


def step(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    """Return a function that runs ``run`` forward and backward, and returns its output."""

    def work() -> Tensor:
        given = [x.detach().requires_grad_() for x in inputs]
        y = run(*given)
        y.backward(torch.ones_like(y))
        return y.detach()

    return work


def compare(name: str, steps: dict[str, Callable[[], Tensor]], rounds: int, tokens: int) -> None:
    """Print one row of the table."""
    apart = float((steps["ours"]() - steps["theirs"]()).abs().max())
    times = medians(steps, rounds)
    ratio = times["theirs"] / times["ours"]
    print(f"| {name} | {tokens / times['ours']:.0f} | {ratio:.2f} | {apart:.1e} |", flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    device.choose("cpu")
    torch.set_num_threads(1)
    cpu_tuning.keep_freed_memory()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    theirs, ours = layers()
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    print(f"torch {torch.__version__}, {args.tokens} tokens, width {HIDDEN}, {VALUE_HEADS} heads")
    print("| | tokens/s | transformers / ours | apart |\n|---|---|---|---|")
    lead = 1, args.tokens
    q, k = (F.normalize(torch.randn(*lead, KEY_HEADS, 128), dim=-1) for _ in range(2))
    v, rate = torch.randn(*lead, VALUE_HEADS, 128), torch.rand(*lead, VALUE_HEADS)
    inputs = q, k, v, -0.1 * rate, rate

    def our_rule(q: Tensor, *others: Tensor) -> Tensor:
        scaled = q * q.shape[-1] ** -0.5
        return gated_delta_rule(*(x.transpose(0, 1) for x in (scaled, *others)))[0].transpose(0, 1)

    rules = {
        "ours": step(our_rule, *inputs),
        "theirs": step(lambda *x: torch_chunk_gated_delta_rule(*x)[0], *inputs),
    }
    compare("rule", rules, args.rounds, args.tokens)
    x = torch.randn(*lead, HIDDEN)
    whole = {
        "ours": step(lambda x: ours(x.transpose(0, 1))[0].transpose(0, 1), x),
        "theirs": step(theirs, x),
    }
    compare("layer", whole, args.rounds, args.tokens)


if __name__ == "__main__":
    main()
