"""From an encoder's embeddings to a language model's: projectors, merging, counting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.models.vision.clip_vit_model import get_num_image_embeddings
from megatron.core.models.vision.multimodal_projector import (
    MultimodalProjector,
    get_projector_spec,
    pixel_shuffle,
)
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from tests.support.one_process import one_rank, tiny_config
from tests.support.ranks import run_ranks

EXACT = {"rtol": 1e-9, "atol": 1e-9}
WIDTH = 24  # of the encoder
SUBMODULES = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)


def projector(kind: str, group: Any, **changes: Any) -> MultimodalProjector:
    config = tiny_config(params_dtype=torch.float64, bias_activation_fusion=False, **changes)
    has_norm = kind == "mlp behind a norm"
    spec = get_projector_spec(has_norm=True) if has_norm else SUBMODULES
    made = MultimodalProjector(config, spec, kind.split()[0], WIDTH, tp_group=group)
    name_parameters(made)
    initialize_parameters(made, 5)
    return made


def computed(made: MultimodalProjector) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    y = made(x)
    y.square().sum().backward()
    assert x.grad is not None
    of_norm = [p.grad for name, p in made.named_parameters() if name.startswith("norm.")]
    return [y.detach(), x.grad, *(grad for grad in of_norm if grad is not None)]


def on_ranks(rank: int, world: int, kind: str) -> list[Tensor]:
    group = create_process_groups(*make_grids(world, tp=world)).tp
    return computed(projector(kind, group, tensor_model_parallel_size=world))


@pytest.mark.parametrize("kind", ["mlp", "affine", "mlp behind a norm"])
def test_a_projector_computes_the_same_on_tensor_parallel_ranks(kind: str) -> None:
    wanted = computed(projector(kind, one_rank()))
    assert wanted[0].shape == (2, 7, 32)
    assert len(wanted) == (4 if kind == "mlp behind a norm" else 2)
    for found in run_ranks(on_ranks, 2, kind):
        for mine, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, one, **EXACT)


@pytest.mark.feature("Vision: the projector of LLaVA computes what transformers' computes")
def test_the_mlp_is_the_projector_of_llava() -> None:
    transformers = pytest.importorskip("transformers")
    llava = pytest.importorskip("transformers.models.llava.modeling_llava")
    text = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, intermediate_size=48)
    vision = transformers.CLIPVisionConfig(hidden_size=WIDTH, num_attention_heads=4)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    theirs = llava.LlavaMultiModalProjector(config).double()
    ours = projector("mlp", one_rank(), ffn_hidden_size=32)
    for mine, their in (("linear_fc1", "linear_1"), ("linear_fc2", "linear_2")):
        ours.encoder.get_submodule(mine).load_state_dict(theirs.get_submodule(their).state_dict())
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)


@pytest.mark.parametrize("changes", [{"kind": "tree"}, {"kind": "mlp", "sequence_parallel": True}])
def test_a_projector_that_cannot_be_built_is_refused(changes: dict[str, Any]) -> None:
    more = {"tensor_model_parallel_size": 2} if "sequence_parallel" in changes else {}
    with pytest.raises(ConfigError, match=r"tree is unknown|without --sequence-parallel"):
        projector(group=one_rank(), **changes, **more)


def test_neighbouring_embeddings_are_merged_as_in_internvl() -> None:
    internvl = pytest.importorskip("transformers.models.internvl.modeling_internvl")
    x = torch.randn(2, 36, 5)
    wanted = internvl.InternVLModel.pixel_shuffle(None, x.view(2, 6, 6, 5), 0.5)
    assert torch.equal(pixel_shuffle(x), wanted.reshape(2, 9, 20))
    rows = pixel_shuffle(x).view(2, 3, 3, 20)
    assert torch.equal(pixel_shuffle(x, version=1).view(2, 3, 3, 20), rows.transpose(1, 2))


@pytest.mark.parametrize("count", [37, 25])
def test_embeddings_that_are_no_squares_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} embeddings of an image cannot be merged"):
        pixel_shuffle(torch.zeros(1, count, 4))


@pytest.mark.parametrize(
    ("kind", "drops", "shuffled", "count"),
    [
        ("clip", False, False, 577),
        ("clip", True, False, 576),
        ("siglip", False, False, 576),
        ("internvit", True, True, 144),
    ],
)
def test_embeddings_of_an_image_are_counted(
    kind: str, drops: bool, shuffled: bool, count: int
) -> None:
    assert get_num_image_embeddings(336, 336, 14, kind, drops, 1, shuffled) == count
