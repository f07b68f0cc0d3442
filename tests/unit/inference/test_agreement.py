"""--batch-invariant-mode: log-probabilities of training are those of the engine, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.device import cpu_kernels
from megatron.core.inference.fast_linear import compute_as_engine, use_fast_linears
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.peft.lora import LoraConfig, attach_adapters
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.post_training.rl.objective import score_labels
from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.unit.inference.test_batch_view import MLA, gpt
from tests.unit.inference.test_engine import MOE, engine, stage

pytestmark = pytest.mark.skipif(
    not cpu_kernels.has("paged_attention", torch.float32), reason="not in the installed extension"
)
LLAMA = {
    "num_query_groups": 2, "gated_linear_unit": True, "activation_func": F.silu,
    "normalization": "RMSNorm", "add_bias_linear": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "window, soft cap and sinks": LLAMA
    | {"window_size": (5, 0), "attn_logit_softcapping": 2.0, "softmax_type": "learnable"},
    "experts": MOE
    | {
        "moe_router_score_function": "sqrtsoftplus",
        "moe_latent_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
    },
    "latent attention": MLA,
}
TRAINING: dict[str, tuple[dict[str, int], bool]] = {  # sizes, sequence parallelism
    "one process": ({}, False),
    "tp2": ({"tp": 2}, False),
    "tp2 sp": ({"tp": 2}, True),
    "tp4": ({"tp": 4}, False),
}
GENERATION: dict[str, dict[str, int]] = {
    "4 replicas": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}
OPTIONS = EngineOptions(page_size=4, max_step_tokens=7, batch_invariant=True)
Rows = list[tuple[list[int], list[float]]]  # tokens, log-probabilities of all but the first


def prompts() -> list[list[int]]:
    return [[(11 * i + 5 * j) % 60 + 2 for j in range(4 + 3 * i)] for i in range(4)]


def generated(made: Engine) -> Rows:
    """Let the engine continue the prompts; it scores them too."""
    use_fast_linears(made.model.module, batch_invariant=True)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        made.follow()
        return []
    found: Rows = [(prompt[:1], []) for prompt in prompts()]
    for i, prompt in enumerate(prompts()):
        params = SamplingParams(
            seed=i,
            num_tokens_to_generate=8,
            ignore_eos=True,
            return_log_probs=True,
            return_prompt_log_probs=True,
        )
        made.add(Request(str(i), prompt, params))
    while made.has_unfinished:
        for output in made.step():
            tokens, log_probs = found[int(output.request_id)]
            scored = (*output.prompt_scores, *output.new)
            tokens += [token.token for token in scored]
            log_probs += [token.log_prob for token in scored]
    made.close()
    return found


def logits_of(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    logits: Tensor = model(ids, positions, None, **more)
    return logits


def scored(model: GPTModel, rows: Rows) -> list[Tensor]:
    """Score the tokens as training does, each in a row of its own, beside an unrelated one."""
    compute_as_engine(model)
    out = []
    for tokens, _ in rows:
        size = len(tokens) - 1 - (len(tokens) - 1) % 4  # sequence parallelism divides it
        ids = torch.tensor([tokens[:size], tokens[1 : size + 1]])
        found = score_labels(
            logits_of(model, ids),
            torch.tensor([tokens[1 : size + 1]]).expand(2, -1),
            model.pg_collection.tp,
            temperature=1.0,
            as_engine=True,
        )
        out.append(found.log_probs[0].detach())
    return out


def assert_equal(found: list[Tensor], rows: Rows) -> None:
    for log_probs, (_, wanted) in zip(found, rows, strict=True):
        assert torch.equal(log_probs, torch.tensor(wanted[: len(log_probs)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_scores_tokens_as_the_engine_that_wrote_them(
    family: str, dtype: torch.dtype
) -> None:
    changes = FAMILIES[family]
    rows = generated(engine(OPTIONS, 1, {}, dtype, **changes))
    assert_equal(scored(stage(1, {}, dtype, **changes), rows), rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_training(family: str) -> None:
    ids = torch.tensor(prompts()[3:])
    grads = []
    for binds in (True, False):
        model = stage(1, {}, torch.float32, **FAMILIES[family])
        if binds:
            compute_as_engine(model)
        logits_of(model, ids).logsumexp(-1).square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        wanted = grads[1][name]
        assert grad is not None
        assert wanted is not None
        assert (grad - wanted).norm() <= tolerances.GRADIENT["rtol"] * wanted.norm(), name


def test_packed_sequences_have_the_bits_of_single_ones() -> None:
    model = stage(1, {}, torch.float32, **LLAMA)
    compute_as_engine(model)
    parts = prompts()[1:]
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    ids = torch.tensor([[token for part in parts for token in part] + [0, 0]])
    together = logits_of(model, ids, packed_seq_params=packed)[0]
    for part, first in zip(parts, ends.tolist(), strict=False):
        alone = logits_of(model, torch.tensor([part]))[0]
        assert torch.equal(together[first : first + len(part)], alone)


def every_layout(rank: int, world: int, dtypes: list[torch.dtype]) -> list[Any]:
    """Return the rows of all engines, and the scores of all layouts of training, by dtype."""
    out: list[Any] = []
    for dtype in dtypes:
        written = {
            name: generated(engine(OPTIONS, world, sizes, dtype))
            for name, sizes in GENERATION.items()
        }
        box = [written["4 replicas"]]
        torch.distributed.broadcast_object_list(box, 0)
        found = {
            name: scored(stage(world, sizes, dtype, sequence_parallel=is_sharded), box[0])
            for name, (sizes, is_sharded) in TRAINING.items()
        }
        out.append((written, found))
    return out


@pytest.mark.feature("RL: the engine's log-probabilities are those of training, in 20 layout pairs")
def test_all_layouts_of_training_and_generation_agree() -> None:
    dtypes = [torch.float32, torch.bfloat16]
    for dtype, (written, found) in zip(dtypes, run_ranks(every_layout, 4, dtypes)[0], strict=True):
        assert len(written) * len(found) == 20
        rows = generated(engine(OPTIONS, 1, {}, dtype))
        for name, others in written.items():
            assert others == rows, name
        for log_probs in found.values():
            assert_equal(log_probs, rows)


def test_models_whose_bits_depend_on_the_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="--batch-invariant-mode: attention with position biases"):
        compute_as_engine(gpt("alibi"))
    adapted = stage(1, {}, torch.float32, **LLAMA)
    attach_adapters(adapted, LoraConfig(rank=2, alpha=2.0, targets=("all-linear",)))
    with pytest.raises(ConfigError, match="--batch-invariant-mode: a low-rank adapter runs"):
        compute_as_engine(adapted)


def test_a_gate_that_is_closed_has_no_gradient() -> None:
    model = stage(1, {}, torch.float32, **FAMILIES["experts"])
    compute_as_engine(model)
    gates = [m for m in model.modules() if isinstance(m, (TopKRouter, SharedExpertMLP))]
    assert len(gates) > 1
    for module in gates:
        x = torch.tensor([-200.0, 0.0, 200.0], requires_grad=True)
        (module.rule if isinstance(module, TopKRouter) else module).sigmoid(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0, 0.25, 0]
