"""Drafts by multi-token-prediction layers change no token and save steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.request import Request, TokenOutput
from megatron.core.inference.paged_engine.request_state import RequestState
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.inference.paged_engine.scheduler import RequestScheduler
from megatron.core.inference.paged_engine.step_plan import NO_TOKEN
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt.gpt_layer_specs import (
    LOCAL,
    get_gpt_layer_local_spec,
    mtp_block_of,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import (
    get_mamba_mtp_block_spec,
    get_mamba_stack_spec,
)
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from tests.support import selection
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

VOCABULARY = 64
LENGTH = 48
PAGE = 4 * 5 * 2 * 32 * 8  # bytes: tokens, layers, keys and values, hidden size, fp64
MLA = {
    "multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 8, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "rotary_scaling_factor": 4.0,
    "cache_mla_latents": True,
}  # fmt: skip
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
HYBRID = {"mtp_hybrid_override_pattern": "*-*", "mtp_use_repeated_layer": True}
Sizes = dict[str, int]
Tokens = dict[str, list[int]]


def gpt(
    world: int, sizes: Sizes, *, position: str = "rope", hybrid: str = "*-*-", **changes: Any
) -> GPTModel:
    torch.manual_seed(7)
    groups = one_process_groups()
    if world > 1:
        groups = create_process_groups(*make_grids(world, **sizes))
    values: dict[str, Any] = {
        "num_layers": 4,
        "init_method_std": 0.3,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "mtp_num_layers": 1,
        "add_bias_linear": False,
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "expert_model_parallel_size": sizes.get("ep", 1),
    }
    config = tiny_config(**values | changes)
    kind: Any = GPTModel
    spec = get_gpt_layer_local_spec(config.num_moe_experts, config=config)
    ahead = mtp_block_of(LOCAL, config, spec)
    if config.mtp_hybrid_override_pattern is not None:
        kind = partial(MambaModel, hybrid_override_pattern=hybrid)
        spec = get_mamba_stack_spec(config)
        ahead = get_mamba_mtp_block_spec(config, spec)
    pp = groups.pp
    return kind(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        pre_process=pp.rank() == 0,
        post_process=pp.rank() == pp.size() - 1,
        position_embedding_type=position,
        mtp_block_spec=ahead,
        pg_collection=groups,
    )


def engine(model: GPTModel, num_drafts: int, **options: Any) -> Engine:
    if num_drafts:
        options |= {"num_draft_tokens": num_drafts, "draft_model": "mtp"}
    place = GenerationModel(
        module=model.eval(),
        config=model.config,
        groups=model.pg_collection,
        device=device.current(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        eod=1,
    )
    return Engine(place, EngineOptions(page_size=4, **options))


def requests() -> list[Request]:
    out = []
    for i in range(9):
        prompt = [(7 * i + 3 * j) % 60 + 2 for j in range(1 + 3 * i)]
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            top_k=0 if i % 3 else 20,
            seed=i,
            num_tokens_to_generate=5 + i,
            return_prompt_log_probs=i == 6,
            min_tokens=4 if i == 5 else 0,
            repetition_penalty=1.3 if i == 4 else 1.0,
        )
        out.append(Request(str(i), prompt, params))
    return out


def generated(
    rank: int,
    world: int,
    sizes: Sizes,
    changes: dict[str, Any],
    num_drafts: int,
    options: dict[str, Any],
) -> tuple[Tokens, int]:
    """Return the tokens, and how many drafts were accepted."""
    made = engine(gpt(world, sizes, **changes), num_drafts, **options)
    if rank:
        made.follow()
        return {}, 0
    tokens: Tokens = {}
    for _ in range(2):  # the second time prompts are in the prefix cache
        found = made.generate(requests())
        again = {k: [t.token for t in row] for k, row in found.items()}
        assert tokens in ({}, again)
        tokens = again
    made.close()
    num_preemptions = sum(s.num_preemptions for s in made._schedulers.values())
    assert num_preemptions or "buffer_bytes" not in options
    stats = made.stats()
    assert (stats.num_running, stats.num_free_pages) == (0, stats.num_pages)
    return tokens, stats.num_accepted_drafts


@pytest.mark.parametrize(
    "changes",
    [{}, MLA, {"mtp_num_layers": 2}, {**HYBRID, "mtp_num_layers": 2}],
    ids=["gqa", "mla", "depths", "hybrid"],
)
@pytest.mark.parametrize("num_drafts", selection.only([3], [1, 3]))
def test_drafts_change_no_token(changes: dict[str, Any], num_drafts: int) -> None:
    wanted, _ = generated(0, 1, {}, changes, 0, {})
    assert generated(0, 1, {}, changes, num_drafts, {})[0] == wanted


@pytest.mark.parametrize(
    "options",
    selection.first(
        2,
        [
            {"buffer_bytes": 13 * PAGE, "max_requests": 4},  # requests are pre-empted
            {"max_step_tokens": 7, "has_prefix_cache": False},
            {"max_step_tokens": 1, "max_requests": 3},
            {"max_requests": 2},
        ],
    ),
)
def test_limits_change_no_token_with_drafts(options: dict[str, Any]) -> None:
    wanted, _ = generated(0, 1, {}, {}, 0, {})
    assert generated(0, 1, {}, {}, 3, options)[0] == wanted


@pytest.mark.parametrize(
    ("world", "sizes", "changes"),
    [
        pytest.param(2, {"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2}, {}, marks=pytest.mark.slow),
        (4, {"tp": 2, "pp": 2}, {"mtp_num_layers": 2}),
        (2, {"ep": 2}, MOE),
    ],
    ids=["tp2", "pp2", "tp2 pp2", "ep2"],
)
def test_layouts_change_no_token_with_drafts(
    world: int, sizes: Sizes, changes: dict[str, Any]
) -> None:
    wanted, _ = generated(0, 1, {}, changes, 0, {})
    options = {"max_requests": 6}
    found = run_ranks(generated, world, sizes, changes, 3, options)
    assert found[0][0] == wanted


def drafted_in_training(model: GPTModel, tokens: list[int]) -> int:
    """Return the token after the next that the MTP layer expects, without a cache."""
    assert model.mtp is not None
    ids = torch.tensor([tokens])
    length = len(tokens) - 1
    shared = {
        "rotary_pos_emb": model.rotary_table(length),
        "attention_bias": model.attention_bias(length, None, None),
    }
    hidden = model.decoder(model.embedding(ids[:, :-1], None), None, **shared)
    embedded = model.embedding(ids[:, 1:], None)
    state, *_ = model.mtp.layers[0](None, None, hidden, None, embedded=embedded, **shared)
    return int(model.logits(state, gather=True)[0, -1].argmax())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 7},
        {"max_step_tokens": 3, "has_prefix_cache": False},
        {"buffer_bytes": 9 * PAGE, "max_requests": 4},  # requests are pre-empted
    ],
)
@pytest.mark.parametrize(
    "changes",
    [{}, MLA, {"position": "alibi"}, HYBRID],
    ids=["gqa", "mla", "alibi", "hybrid"],
)
def test_drafts_are_those_of_a_forward_pass_over_the_text(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = gpt(1, {}, **changes)
    made = engine(model, 1, **options)
    log: list[tuple[list[int], int]] = []
    accept = RequestScheduler._accept

    def recorded(
        self: RequestScheduler,
        state: RequestState,
        rows: list[TokenOutput],
        drafts: list[int],
        offered: list[int],
    ) -> object:
        found = accept(self, state, rows, drafts, offered)
        log.extend(
            (state.tokens.view().tolist(), token) for token in offered[:1] if token != NO_TOKEN
        )
        return found

    monkeypatch.setattr(RequestScheduler, "_accept", recorded)
    common = [5, 9, 2, 8, 7, 7, 3, 4]  # two pages; what follows them differs
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=9, ignore_eos=True)
    for end in ([], [11], [12, 6], [11, 30, 31, 32, 33], [12, 6, 40]):
        made.add(Request(str(end), [*common, *end], params))
        made.step()
    while made.has_unfinished:
        made.step()
    assert len(log) > 20
    if "buffer_bytes" in options and not changes:
        assert sum(s.num_preemptions for s in made._schedulers.values())
    with torch.no_grad():
        assert [token for _, token in log] == [drafted_in_training(model, t) for t, _ in log]


def successor_model(num_depths: int) -> GPTModel:
    """A model in which each token has a likely successor, which its MTP layers know too."""
    changes = {"hidden_size": VOCABULARY, "normalization": "RMSNorm", "num_layers": 1}
    model = gpt(1, {}, mtp_num_layers=num_depths, **changes)
    assert model.mtp is not None
    identity = torch.eye(VOCABULARY, dtype=torch.float64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                weight.zero_()  # residual stream alone
            elif name.endswith("eh_proj.weight"):
                weight.copy_(torch.cat([identity, 0 * identity], 1))
        model.embedding.word_embeddings.weight.copy_(identity)
        model.output_layer.weight.copy_(identity.roll(3, 0))  # token + 3
    return model


@pytest.mark.feature("Generation: drafts by multi-token prediction (--inference-draft-model mtp)")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(("num_depths", "num_drafts"), [(1, 1), (1, 3), (2, 2), (2, 5)])
def test_good_drafts_save_steps(temperature: float, num_depths: int, num_drafts: int) -> None:
    model = successor_model(num_depths)
    params = SamplingParams(
        temperature=temperature, num_tokens_to_generate=37, ignore_eos=True, seed=4
    )
    found = []
    for number in (0, num_drafts):
        made = engine(model, number)
        made.add(Request("a", [4, 9, 6], params))
        tokens: list[int] = []
        num_steps = 0
        while made.has_unfinished:
            num_steps += 1
            for output in made.step():
                tokens += [t.token for t in output.new]
        found.append((tokens, num_steps, made.stats()))
    (plain, num_plain, _), (drafted, num_drafted, stats) = found
    assert drafted == plain
    assert num_plain == 37
    assert stats.num_accepted_drafts == stats.num_drafts
    assert num_drafted == 1 + -(-36 // (1 + num_drafts))
    successors = [(t + 3) % VOCABULARY for t in plain[:-1]]
    assert (plain[1:] == successors) == (temperature == 0)


def test_a_model_without_mtp_layers_cannot_draft_with_them() -> None:
    model = gpt(1, {}, mtp_num_layers=None)
    with pytest.raises(ConfigError, match="mtp: the model has no layers for multi-token.*use --"):
        engine(model, 1)
    with pytest.raises(ConfigError, match="mtp has no effect with --inference-num-draft-tokens 0"):
        engine(gpt(1, {}), 0, draft_model="mtp")


def test_layers_with_a_state_draft_no_tokens() -> None:
    sizes = {"mamba_head_dim": 8, "mamba_state_dim": 4, "mamba_num_groups": 2}
    for pattern, ahead in (("*-*-", "M"), ("M-*-", "*")):
        model = gpt(1, {}, hybrid=pattern, mtp_hybrid_override_pattern=ahead, **sizes)
        with pytest.raises(ConfigError, match="states cannot be taken back after a rejected draft"):
            engine(model, 1)
