"""--batch-invariant-mode: a training pass computes the log-probs of the engine, by bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.inference.fast_linear import use_fast_linears
from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.batch_invariant import make_batch_invariant
from tests.support.ranks import run_ranks
from tests.unit.inference.test_batch_view import MLA
from tests.unit.inference.test_engine import LENGTH, MOE, engine
from tests.unit.models.test_bert_model import bert

FLAG = "--batch-invariant-mode"
LLAMA: dict[str, Any] = {
    "num_query_groups": 2, "gated_linear_unit": True, "activation_func": F.silu,
    "normalization": "RMSNorm", "add_bias_linear": False, "qk_layernorm": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "grouped queries": LLAMA,
    "experts": MOE
    | {
        "num_moe_experts": 5, "moe_router_score_function": "sigmoid", "moe_grouped_gemm": True,
        "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True,
    },
    "latent attention": MLA,
    "window, soft cap and sinks": {
        "window_size": (5, 0), "attn_logit_softcapping": 2.0, "softmax_type": "learnable",
    },
}  # fmt: skip


def requests() -> list[Request]:
    out = []
    for i in range(7):
        prompt = [(11 * (i // 3) + 5 * j) % 60 + 2 for j in range(1 + 4 * i)]
        params = SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            seed=i,
            num_tokens_to_generate=min(12, LENGTH - len(prompt)),
            ignore_eos=True,
            return_log_probs=True,
            return_prompt_log_probs=bool(i % 3),
        )
        out.append(Request(str(i), prompt, params))
    return out


def sampled(running: Engine) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens of each request, with its prompt, and the log-probs of the last of them."""
    out: dict[str, tuple[list[int], list[float]]] = {}
    for request in requests():
        running.add(request)
        out[request.request_id] = (list(request.prompt), [])
    while running.has_unfinished:
        for output in running.step():
            tokens, log_probs = out[output.request_id]
            tokens += [t.token for t in output.new]
            log_probs += [t.log_prob for t in (*output.prompt_scores, *output.new)]
    running.close()
    return out


def losses(model: nn.Module, texts: list[list[int]], **more: Any) -> Tensor:
    """Losses [b, s] of a training pass over texts that are padded to one length."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    found: Tensor = model.train()(
        ids, torch.arange(longest)[None].expand_as(ids), None, labels=ids.roll(-1, 1), **more
    )
    return found


def trained(found: dict[str, tuple[list[int], list[float]]], per_loss: Tensor) -> list[Tensor]:
    """Log-probs that the losses [b, s] of all texts give the tokens that the engine scored."""
    rows = zip(found.values(), per_loss, strict=True)
    return [-row[: len(text) - 1][len(text) - 1 - len(p) :] for (text, p), row in rows]


@pytest.mark.feature(
    "Generation: log-probs of training equal the engine's by bits (--batch-invariant-mode)"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_computes_the_bits_of_the_engine(family: str, dtype: torch.dtype) -> None:
    options = EngineOptions(page_size=4, batch_invariant=True, max_step_tokens=9)
    made, training = (engine(options, 1, {}, dtype, **FAMILIES[family]) for _ in range(2))
    use_fast_linears(made.model.module, batch_invariant=True)
    make_batch_invariant(training.model.module, FLAG)
    found = sampled(made)
    texts = [text for text, _ in found.values()]
    together = losses(training.model.module, texts)
    assert together.requires_grad
    for (_, scores), log_probs in zip(found.values(), trained(found, together), strict=True):
        assert torch.equal(torch.tensor(scores), log_probs)
    for text, row in zip(texts, together, strict=True):  # in a batch of its own
        alone = losses(training.model.module, [[*text, 0]])
        assert torch.equal(alone[0, : len(text) - 1], row[: len(text) - 1])


def test_packed_documents_have_the_bits_of_documents_alone() -> None:
    training = engine(EngineOptions(), 1, {}, torch.float32, **LLAMA).model.module
    make_batch_invariant(training, FLAG)
    texts = [[(5 * i + 3 * j) % 60 + 2 for j in range(4 + 5 * i)] for i in range(3)]
    ends = torch.tensor([0, 4, 13, 27], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    row = losses(training, [sum(texts, [])], packed_seq_params=packed)[0]
    for text, start in zip(texts, ends.tolist(), strict=False):
        alone = losses(training, [text])[0]
        assert torch.equal(row[start : start + len(text) - 1], alone[:-1])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    texts = [[(7 * i + 3 * j + j * j) % 60 + 2 for j in range(LENGTH)] for i in range(3)]
    model.zero_grad()
    losses(model, texts).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare_gradients(rank: int, world: int, sizes: dict[str, int], changes: dict[str, Any]) -> int:
    """Compare the gradients of both modes; return the number of parameters."""
    model = engine(EngineOptions(), world, sizes, torch.float32, **changes).model.module
    wanted = {name: grad.clone() for name, grad in gradients(model).items()}
    make_batch_invariant(model, FLAG)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-5, rtol=1e-5, msg=name)
    return len(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_default_mode(family: str) -> None:
    assert compare_gradients(0, 1, {}, FAMILIES[family]) > 10


def scored_and_trained(rank: int, world: int) -> float:
    """Return the largest difference of log-probs of the engine and training on ``world`` ranks."""
    options = EngineOptions(page_size=4, batch_invariant=True)
    sizes = {"tp": world}
    made, training = (engine(options, world, sizes, torch.float32, **LLAMA) for _ in range(2))
    use_fast_linears(made.model.module, batch_invariant=True)
    make_batch_invariant(training.model.module, FLAG)
    box = [None]
    if rank:
        made.follow()
    else:
        box = [sampled(made)]  # type: ignore[list-item]
    torch.distributed.broadcast_object_list(box)
    assert box[0] is not None
    log_probs = trained(
        box[0], losses(training.model.module, [text for text, _ in box[0].values()])
    )
    return max(
        float((torch.tensor(scores) - row).abs().max())
        for (_, scores), row in zip(box[0].values(), log_probs, strict=True)
    )


def test_tensor_parallel_ranks_agree_to_rounding() -> None:
    assert max(run_ranks(scored_and_trained, 2)) < 1e-5
    assert min(run_ranks(compare_gradients, 2, {"tp": 2}, LLAMA)) > 10


def test_models_that_cannot_be_invariant_are_refused() -> None:
    model = engine(EngineOptions(), 1, {}, torch.float64).model.module
    with pytest.raises(MissingDependency, match=f"{FLAG} needs compiled kernels: .*float64"):
        make_batch_invariant(model, FLAG)
    encoder = bert()
    with pytest.raises(ConfigError, match=f"{FLAG}: only causal attention has a kernel"):
        make_batch_invariant(encoder, FLAG)
