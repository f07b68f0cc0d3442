"""Requests that share passes, in pages, get the logits that each gets alone in one pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.core.inference.paged_engine.cache import BatchView, PagedCache, SlotPositions
from megatron.core.inference.paged_engine.step_plan import SAMPLE, Segment, StepPlan
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.unit.models.test_t5_model import build_t5

LENGTH = 24
VOCABULARY = 50
PAGE = 4
DTYPE = {"params_dtype": torch.float64, "init_method_std": 0.3}
MLA = {
    "multi_latent_attention": True, "qk_layernorm": True, "add_bias_linear": False,
    "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
    "rotary_scaling_factor": 4.0,
}  # fmt: skip
GPT: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("learned_absolute", {}),
    "grouped queries": ("rope", {"num_query_groups": 2}),
    "alibi": ("alibi", {}),
    "window, soft cap and sinks": (
        "rope",
        {"window_size": (5, 0), "attn_logit_softcapping": 2.0, "softmax_type": "learnable"},
    ),
    "latent attention": ("rope", MLA),
    "cached latents": ("rope", MLA | {"cache_mla_latents": True}),
    "experts": ("rope", {"num_moe_experts": 4, "moe_router_topk": 2}),
}


def gpt(position: str, **changes: Any) -> GPTModel:
    torch.manual_seed(5)
    config = tiny_config(**DTYPE, **changes)
    spec = get_gpt_layer_local_spec(config.num_moe_experts, config=config)
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        position_embedding_type=position,
        pg_collection=one_process_groups(),
    ).eval()


def mamba() -> MambaModel:
    torch.manual_seed(5)
    sizes = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 2}
    return MambaModel(
        tiny_config(num_layers=4, **DTYPE, **sizes),
        mamba_stack_spec,
        VOCABULARY,
        LENGTH,
        hybrid_override_pattern="M*-M",
        pg_collection=one_process_groups(),
    ).eval()


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def plans(lengths: list[int], seed: int) -> Iterator[tuple[StepPlan, list[tuple[int, int]]]]:
    """Random chunks of requests on shuffled pages, and (request, position) of each output."""
    rng = random.Random(seed)
    free = rng.sample(range(64), 64)
    pages = [[free.pop() for _ in range(-(-n // PAGE))] for n in lengths]
    done = [0] * len(lengths)
    while left := [i for i, n in enumerate(lengths) if done[i] < n]:
        segments = []
        rows = []
        for i in rng.sample(left, rng.randint(1, len(left))):
            count = rng.choice([1, 1, rng.randint(1, lengths[i] - done[i])])
            stop = done[i] + count
            wanted = rng.randint(0, count)
            held = ints(*pages[i][: -(-stop // PAGE)])
            tokens = ints(*(token(i, at) for at in range(done[i], stop)))
            segments.append(Segment(i, done[i], tokens, held, np.full(wanted, SAMPLE)))
            rows += [(i, at) for at in range(stop - wanted, stop)]
            done[i] = stop
        yield StepPlan(segments), rows


def token(request: int, position: int) -> int:
    return (7 + 13 * request + 5 * position + position**2) % VOCABULARY


def check(
    lengths: list[int],
    whole: list[Tensor],
    run: Callable[[BatchView, bool], Tensor],
    *,
    sources: tuple[tuple[int, int], ...] = (),
) -> None:
    """Compare the logits of random plans with ``whole``, those [s, v] of each request alone."""
    for seed in range(4):
        cache = PagedCache(64, PAGE, len(lengths))
        is_first = True
        for plan, rows in plans(lengths, seed):
            view = BatchView(
                cache,
                plan,
                torch.device("cpu"),
                slots=SlotPositions(len(lengths) + 1),
                sources=sources if is_first else (),
                row_invariant=bool(seed % 2),
            )
            with torch.no_grad():
                logits = run(view, is_first)[0]
            is_first = False
            expected = [whole[request][position] for request, position in rows]
            assert len(logits) == len(expected)
            if expected:
                torch.testing.assert_close(
                    logits, torch.stack(expected), **tolerances.of(logits.dtype)
                )


def check_decoder(model: nn.Module) -> None:
    lengths = [1, 9, 17, 24]
    rows = [torch.tensor([[token(i, at) for at in range(n)]]) for i, n in enumerate(lengths)]
    with torch.no_grad():
        whole = [model(ids, torch.arange(ids.shape[1])[None], None)[0] for ids in rows]

    def run(view: BatchView, _: bool) -> Tensor:
        ids = view.token_ids[None]
        logits: Tensor = model(
            ids, view.positions(ids.shape[1])[0][None], None, inference_context=view
        )
        return logits

    check(lengths, whole, run)


@pytest.mark.feature("Generation: requests share passes and pages; each gets its own logits")
@pytest.mark.parametrize("name", GPT)
def test_logits_do_not_depend_on_the_batch(name: str) -> None:
    position, changes = GPT[name]
    check_decoder(gpt(position, **changes))


def test_states_of_recurrent_layers_belong_to_requests() -> None:
    check_decoder(mamba())


@pytest.mark.parametrize("position", ["relative", "learned_absolute", "rope"])
def test_a_decoder_attends_to_the_source_of_its_request(position: str) -> None:
    model = build_t5(position=position, params_dtype=torch.float64).eval()
    lengths = [3, 7, 6]
    source_lengths = [5, 1, 6]
    ids = [torch.tensor([[token(i, at) for at in range(n)]]) for i, n in enumerate(lengths)]
    read = [
        torch.tensor([[token(9 + i, at) for at in range(n)]]) for i, n in enumerate(source_lengths)
    ]
    with torch.no_grad():
        whole = [model(source, target)[0] for source, target in zip(read, ids, strict=True)]
        encoded = torch.cat([model(x, None, output_encoder_hidden_only=True) for x in read])

    def run(view: BatchView, is_first: bool) -> Tensor:
        states = encoded if is_first else encoded[:0]
        logits: Tensor = model(
            None, view.token_ids[None], encoder_hidden_states=states, inference_context=view
        )
        return logits

    check(lengths, whole, run, sources=tuple(enumerate(source_lengths)))


def test_states_are_kept_in_their_own_types_and_returned_in_the_computed_ones() -> None:
    probe = PagedCache(1, 2, 1, state_dtypes=(torch.bfloat16, None))
    conv, ssm = torch.full((1, 3), 1 / 3), torch.full((1, 2), 1 / 3)
    probe.keep_state(0, [0], (conv, ssm))
    cache = PagedCache(1, 2, 4, state_dtypes=(torch.bfloat16, None))
    cache.allocate(probe)
    cache.keep_state(0, [2], (conv, ssm))
    assert [kept.dtype for kept in cache.states[0]] == [torch.bfloat16, torch.float32]
    found = cache.state(0, [2])
    assert [part.dtype for part in found] == [torch.float32, torch.float32]
    assert torch.equal(found[0], conv.bfloat16().float())
    assert torch.equal(found[1], ssm)


def test_pages_are_copied_in_all_layers() -> None:
    cache = PagedCache(4, 2, 1)
    key = torch.zeros(1, 1, 1, 3)
    for layer in range(2):
        keys, values = cache.layer(layer, key, key[..., :2])
        keys.copy_(torch.arange(5.0)[:, None, None, None].expand_as(keys))
        values.copy_(keys[..., :2] + 10 * layer)
    cache.copy_pages([(1, 3), (2, 0)])
    for layer in range(2):
        keys, values = cache.layer(layer, key, key)
        assert keys[:, 0, 0, 0].tolist() == [2, 1, 2, 1, 4]
        assert values[:, 1, 0, 1].tolist() == [x + 10 * layer for x in (2, 1, 2, 1, 4)]
    assert cache.bytes_per_page == 2 * 2 * (3 + 2) * 4
