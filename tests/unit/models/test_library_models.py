"""Models as projects build and change them: without groups, with forward passes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.enums import AttnMaskType
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.models.vision.multimodal_projector import (
    MultimodalProjector,
    get_projector_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel import parallel_state
from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

VOCABULARY, LENGTH = 64, 16


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(LENGTH).expand(2, LENGTH)


def gpt(position: str = "rope", is_tied: bool = False, **config: Any) -> GPTModel:
    torch.manual_seed(3)
    return GPTModel(
        config=tiny_config(**{"init_method_std": 0.3} | config),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type=position,
    )


def forward_of_a_project(model: GPTModel, packed: PackedSeqParams | None = None) -> Tensor:
    """Logits by a forward pass written for Megatron Core."""
    ids, positions = tokens()
    ids = ids if packed is None else ids.view(1, -1)
    prepared = model._preprocess(
        input_ids=ids,
        position_ids=positions,
        decoder_input=None,
        inference_context=None,
        packed_seq_params=packed,
    )
    decoder_input, rotary, cos, sin, offset = prepared[:5]
    hidden = model.decoder(
        hidden_states=decoder_input,
        attention_mask=None,
        inference_context=None,
        rotary_pos_emb=rotary,
        rotary_pos_cos=cos,
        rotary_pos_sin=sin,
        packed_seq_params=packed,
        sequence_len_offset=offset,
    )
    is_tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if is_tied else None
    logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=None)
    return logits.transpose(0, 1)


@pytest.mark.feature("Library: models without process groups")
def test_a_model_without_groups_and_without_torch_distributed_learns() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    spec = get_gpt_layer_local_spec()
    # The order of Megatron Core, with groups in the place of model_comm_pgs.
    given = (config, spec, VOCABULARY, LENGTH, True, True, False, True, True, "rope", 1.0, 10000)
    model = GPTModel(*given, False, 8.0, True, None, None, None, 0)
    assert model.vp_stage == 0
    assert model.share_embeddings_and_output_weights
    ids, positions = tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(ids, positions, None, labels=ids, inference_params=None).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_groups_by_their_former_name_are_the_ones_that_are_used() -> None:
    groups = one_process_groups()
    spec = get_gpt_layer_local_spec()
    model = GPTModel(tiny_config(), spec, VOCABULARY, LENGTH, model_comm_pgs=groups)  # type: ignore[call-arg]
    assert model.pg_collection is groups
    assert model.model_comm_pgs is groups


@pytest.mark.parametrize("position", ["rope", "learned_absolute"])
def test_a_forward_pass_of_a_project_has_the_logits_and_gradients_of_ours(position: str) -> None:
    results = []
    for run in (forward_of_a_project, lambda model: model(*tokens(), None)):
        model = gpt(position, is_tied=True)
        logits = run(model)
        logits.pow(2).mean().backward()
        results.append((logits, model.embedding.word_embeddings.weight.grad))
    torch.testing.assert_close(*results)


def test_a_forward_pass_of_a_project_takes_packed_sequences() -> None:
    model = gpt().eval()
    bounds = torch.tensor([0, 5, 2 * LENGTH], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=27, max_seqlen_kv=27)
    ours = model(tokens()[0].view(1, -1), None, None, packed_seq_params=packed)
    torch.testing.assert_close(forward_of_a_project(model, packed), ours)
    rotary = model.rotary_pos_emb
    assert rotary is not None
    places = torch.cat((torch.arange(5), torch.arange(2 * LENGTH - 5)))
    for angles in (rotary(2 * LENGTH - 5, packed_seq=True), rotary(2 * LENGTH)[places]):
        model._preprocess = lambda angles=angles, **given: (  # type: ignore[method-assign]
            model.embedding(given["input_ids"], None),
            angles,
            None,
            None,
            None,
        )
        torch.testing.assert_close(forward_of_a_project(model, packed), ours)


def test_the_end_of_the_forward_pass_can_be_replaced_in_one_model() -> None:
    model = gpt().eval()
    ids, positions = tokens()
    seen: dict[str, Any] = {}

    def postprocess(self: GPTModel, hidden_states: Tensor, **given: Any) -> Tensor:
        seen.update(given)
        logits: Tensor = self.output_layer(hidden_states, weight=None)[0]
        return logits.transpose(0, 1).logsumexp(-1)

    logits = model(ids, positions, None)
    model._postprocess = postprocess.__get__(model)  # type: ignore[method-assign]
    torch.testing.assert_close(model(ids, positions, None, labels=ids), logits.logsumexp(-1))
    assert seen["labels"] is ids
    assert not seen["mtp_in_postprocess"]


class ValueHead(nn.Linear):
    """An output layer of a project."""

    def forward(self, x: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        return super().forward(x), None


def test_an_output_layer_of_a_project_gives_the_values() -> None:
    model = gpt()
    model.output_layer = ValueHead(32, 1)  # type: ignore[assignment]
    values = model(*tokens(), None)
    assert values.shape == (2, LENGTH, 1)
    values.sum().backward()
    assert model.embedding.word_embeddings.weight.grad is not None


def _doubled(result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return result[0] * 2, result[1]


@pytest.mark.parametrize("way", ["hook", "hook before", "forward", "loss"])
def test_losses_have_the_changes_of_a_project_to_the_output_layer(way: str) -> None:
    model = gpt()
    ids, positions = tokens()
    logits = model(ids, positions, None)
    layer, forward = model.output_layer, model.output_layer.forward
    if way == "hook":
        layer.register_forward_hook(lambda module, given, result: _doubled(result))
    elif way == "hook before":
        layer.register_forward_pre_hook(lambda module, given: (given[0] * 2, *given[1:]))
    elif way == "forward":
        layer.forward = lambda *args, **kwargs: _doubled(forward(*args, **kwargs))
    else:
        loss = model.compute_language_model_loss
        model.compute_language_model_loss = lambda labels, logits: loss(labels, logits * 2)
    expected = nn.functional.cross_entropy((logits * 2).transpose(1, 2), ids, reduction="none")
    torch.testing.assert_close(model(ids, positions, None, labels=ids), expected)


class LayerOfTwoParts(TransformerLayer):
    """A layer of a project that replaces both parts of the forward pass."""

    def _forward_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        states, context = super()._forward_attention(*args, **kwargs)
        return states * 2, context

    def _forward_mlp(self, hidden_states: Tensor, inference_context: Any = None) -> Tensor:
        return super()._forward_mlp(hidden_states, inference_context) * 3


class LayerForOlderReleases(TransformerLayer):
    """The same layer for Megatron Core v0.12, whose first part ends with the norm of the MLP."""

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        states, context = super()._forward_attention(*args, **kwargs)
        return self.pre_mlp_layernorm(states * 2), states * 2, context

    def _forward_mlp(self, normed: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        output, bias = self.mlp(normed)
        return (residual + (output if bias is None else output + bias)) * 3


@pytest.mark.parametrize("kind", [LayerOfTwoParts, LayerForOlderReleases])
def test_the_parts_of_a_layer_of_a_project_run(kind: type[TransformerLayer]) -> None:
    spec = get_gpt_layer_local_spec()
    torch.manual_seed(3)
    plain, own = (
        build_module(ModuleSpec(module=each, submodules=spec.submodules), config=tiny_config())
        for each in (TransformerLayer, kind)
    )
    own.load_state_dict(plain.state_dict())
    states = torch.randn(LENGTH, 2, 32)
    attended, _ = plain._forward_attention(states)
    torch.testing.assert_close(own(states)[0], plain._forward_mlp(attended * 2) * 3)


def test_parts_that_a_project_replaces_take_the_places_of_ours() -> None:
    model = gpt(is_tied=True)
    old = {name: info_of(param) for name, param in model.named_parameters()}
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    before = weight.detach().clone()
    model.embedding = LanguageModelEmbedding(model.config, VOCABULARY, LENGTH, "none")
    new = {name: info_of(param) for name, param in model.named_parameters()}
    name = "embedding.word_embeddings.weight"
    assert new == old
    assert new[name].is_shared_embedding
    assert torch.equal(weight, before)
    model.decoder = TransformerBlock(model.config, get_gpt_layer_local_spec())
    assert {n: info_of(p).name for n, p in model.named_parameters()} == {
        n: info.name for n, info in old.items()
    }


class OwnRotary(nn.Module):
    """A rotary embedding of a project: positions run at half speed."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, max_seq_len: int, packed_seq: bool = False) -> Tensor:
        return self.rotary(max_seq_len, packed_seq=packed_seq) / 2


class OwnAttention(SelfAttention):
    """Attention of a project, which notes the rotary embedding that it gets."""

    seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        OwnAttention.seen = kwargs["rotary_pos_emb"]
        return super().forward(*args, **kwargs)


def test_a_rotary_embedding_and_attention_of_a_project_deal_in_angles() -> None:
    model = gpt().eval()
    rotary = model.rotary_pos_emb
    assert rotary is not None
    model.rotary_pos_emb = OwnRotary(rotary)  # type: ignore[assignment]
    prepared = model._preprocess(*tokens())
    torch.testing.assert_close(prepared[1], rotary(LENGTH) / 2)
    changed, forward = gpt().eval(), rotary.forward
    changed.rotary_pos_emb.forward = lambda *args, **kwargs: forward(*args, **kwargs) / 2
    torch.testing.assert_close(changed(*tokens(), None), model(*tokens(), None))
    with pytest.raises(ConfigError, match="forward is replaced"):
        changed(*tokens(), None, inference_context=StaticInferenceContext(2, LENGTH))

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.module = OwnAttention
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.causal
    torch.manual_seed(3)
    config = tiny_config(init_method_std=0.3)
    own = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope").eval()
    torch.testing.assert_close(own(*tokens(), None), gpt().eval()(*tokens(), None))
    torch.testing.assert_close(OwnAttention.seen, rotary(LENGTH))


def test_frequencies_that_a_project_changes_rotate_the_next_pass() -> None:
    model, slow = gpt().eval(), gpt(rotary_interleaved=False).eval()
    before = model(*tokens(), None)
    assert model.rotary_pos_emb is not None
    assert slow.rotary_pos_emb is not None
    model.rotary_pos_emb.inv_freq /= 4
    slow.rotary_pos_emb.seq_len_interpolation_factor = 4
    after = model(*tokens(), None)
    torch.testing.assert_close(after, slow(*tokens(), None))
    assert not torch.allclose(after, before, atol=1e-3)


def test_a_word_look_up_of_a_project_gets_rows_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = LanguageModelEmbedding(
        tiny_config(), VOCABULARY, LENGTH, "learned_absolute", 0, True
    )
    ids, positions = tokens()
    expected = embedding(input_ids=ids, position_ids=positions)
    own, shapes = VocabParallelEmbedding.forward, []

    def look_up(self: VocabParallelEmbedding, input_: Tensor) -> Tensor:
        shapes.append(input_.shape)
        return own(self, input_)

    monkeypatch.setattr(VocabParallelEmbedding, "forward", look_up)
    torch.testing.assert_close(embedding(ids, positions), expected)
    assert shapes == [ids.shape]
    assert embedding.add_position_embedding


def test_a_projector_without_groups_is_initialized() -> None:
    config = tiny_config(ffn_hidden_size=48)
    projector = MultimodalProjector(config, get_projector_spec(), "mlp", 24)
    assert projector(torch.ones(5, 24)).std() > 0


def test_a_hybrid_model_by_its_later_name() -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    assert hybrid_stack_spec is mamba_stack_spec
    config = tiny_config(num_layers=3, mamba_num_groups=1, mamba_head_dim=16)
    model = HybridModel(config, hybrid_stack_spec, VOCABULARY, LENGTH, hybrid_layer_pattern="M*-")
    loss = model(*tokens(), None, labels=tokens()[0]).mean()
    loss.backward()
    assert loss > 3


class ProjectModel(LanguageModule):
    """A language model of a project: its own constructor and forward pass."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.share_embeddings_and_output_weights = True
        self.embedding = LanguageModelEmbedding(config, VOCABULARY, LENGTH, "none")
        spec = get_gpt_layer_local_spec()
        self.decoder = TransformerBlock(config, spec)
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            VOCABULARY,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
        )
        self.setup_embeddings_and_output_layer()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.decoder(self.embedding(ids, None), None)
        logits, _ = self.output_layer(hidden, weight=self.shared_embedding_or_output_weight())
        return self.compute_language_model_loss(labels, logits)


def two_steps(rank: int, world_size: int) -> list[float]:
    if world_size > 1:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    torch.manual_seed(5)
    size = {"tensor_model_parallel_size": world_size, "init_method_std": 0.2}
    model = ProjectModel(tiny_config(**size))
    assert (
        info_of(model.embedding.word_embeddings.weight).name == "embedding.word_embeddings.weight"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    ids = tokens()[0]
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, ids.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.feature("Library: language models of projects")
def test_a_language_model_of_a_project_trains_alike_on_one_and_two_ranks() -> None:
    alone = two_steps(0, 1)
    assert alone[-1] < alone[0]
    for losses in run_ranks(two_steps, 2):
        expected = torch.tensor(alone)
        torch.testing.assert_close(torch.tensor(losses), expected, **tolerances.of(torch.float32))
