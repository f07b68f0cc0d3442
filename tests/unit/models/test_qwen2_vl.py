"""Qwen2-VL: the encoder, and the complete model on a row with two images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, DataError
from megatron.core.models.multimodal.qwen2_vl_model import Qwen2VLVisionModel
from megatron.core.models.multimodal.splicing import splice
from megatron.core.models.vision.multimodal_projector import (
    MultimodalProjector,
    get_projector_spec,
)
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.family import Config
from megatron.training.conversion.vision_language import QWEN2_VL, shape_of_config
from tests.support import tolerances
from tests.support.encoders import built, encoder_from_hf, encoder_to_hf
from tests.support.one_process import one_process_groups, one_rank, tiny_config
from tests.support.ranks import run_ranks
from tests.unit.models.test_mrope import IMAGE_TOKEN, ours, qwen

GRIDS = [(1, 4, 6), (2, 2, 4)]  # an image, and a video of two pairs of frames
SIDE = 4
FRAMES = 2


def images_config(model: Any) -> Config:
    """Return config.json of the encoder of ``model``."""
    images: Config = model.config.to_dict()["vision_config"]
    return images


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the encoder under their names, of the projector under ours."""
    projector = {
        f"{ours.removeprefix('vision_projection.')}.{kind}": tensors[f"{theirs[7:]}.{kind}"]
        for ours, theirs in QWEN2_VL.projector.items()
        for kind in ("weight", "bias")
    }
    return {n: t for n, t in tensors.items() if not n.startswith("merger.mlp.")}, projector


def encoder(model: Any) -> tuple[Qwen2VLVisionModel, MultimodalProjector]:
    """Return our encoder and projector with the weights of ``model``."""
    config = images_config(model)
    made = built(config, one_process_groups())
    assert isinstance(made, Qwen2VLVisionModel)
    source = made.config.hidden_size * config["spatial_merge_size"] ** 2
    width = TransformerConfig(
        num_layers=1,
        hidden_size=config["hidden_size"],
        num_attention_heads=1,
        ffn_hidden_size=source,
        bias_activation_fusion=False,
    )
    projector = MultimodalProjector(width, get_projector_spec(), "mlp", source, tp_group=one_rank())
    images, of_projector = split(model.model.visual.state_dict())
    made.load_state_dict(encoder_from_hf(made, config, images))
    projector.load_state_dict(of_projector)
    return made.eval(), projector.eval()


def patches() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    count = sum(t * h * w for t, h, w in GRIDS)
    return torch.randn(count, 3 * FRAMES * SIDE**2, generator=generator)


@pytest.mark.feature("Vision: Qwen2-VL's encoder has the features and gradients of transformers'")
def test_features_and_gradients_are_those_of_transformers() -> None:
    model = qwen()
    made, projector = encoder(model)
    found = projector(made(patches(), GRIDS)[0])
    wanted = model.model.visual(patches(), torch.tensor(GRIDS)).pooler_output
    torch.testing.assert_close(found, wanted, **tolerances.LOGITS)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    found.backward(grad)
    wanted.backward(grad)
    gradients = {n: p.grad for n, p in model.model.visual.named_parameters()}
    images, of_projector = split(gradients)
    expected = encoder_from_hf(made, images_config(model), images)
    for part, wanted_of in ((made, expected), (projector, of_projector)):
        for name, param in part.named_parameters():
            assert param.grad is not None, name
            value = wanted_of[name]
            largest = value.abs().max()
            torch.testing.assert_close(
                param.grad / largest, value / largest, **tolerances.LOGITS, msg=name
            )


@pytest.mark.feature("Vision: Qwen2-VL has the logits of transformers' model on rows with images")
def test_logits_are_those_of_transformers() -> None:
    model = qwen()
    grids = [(1, 4, 6), (1, 6, 2)]
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(36, 3 * FRAMES * SIDE**2, generator=generator)
    ids = torch.tensor([[5, 7, -200, 9, -200, 11]])
    is_image = ids == -200
    sizes = torch.zeros(1, 6, 3, dtype=torch.int64)
    sizes[is_image] = torch.tensor([(t, h // 2, w // 2) for t, h, w in grids])
    where = splice(is_image, sizes.prod(-1))
    made, projector = encoder(model)
    gpt = ours(model)
    text = gpt.embedding(ids.clamp(min=0), None).transpose(0, 1)
    combined = where.embeddings(text, projector(made(pixels, grids)[0])).transpose(0, 1)
    positions = where.grid_positions(sizes)
    found = gpt(None, positions, None, decoder_input=combined.contiguous())
    row = [5, 7, *[IMAGE_TOKEN] * 6, 9, *[IMAGE_TOKEN] * 3, 11]
    spread = torch.tensor([row])
    wanted = model(
        input_ids=spread,
        pixel_values=pixels,
        image_grid_thw=torch.tensor(grids),
        mm_token_type_ids=(spread == IMAGE_TOKEN).int(),
        use_cache=False,
    ).logits
    torch.testing.assert_close(found, wanted, **tolerances.LOGITS)


def test_tensors_come_back_bit_by_bit() -> None:
    model = qwen()
    config = images_config(model)
    made, _ = encoder(model)
    tensors, _ = split(model.model.visual.state_dict())
    back = encoder_to_hf(made, config, encoder_from_hf(made, config, tensors))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name
    with pytest.raises(CheckpointError, match=r"no tensor merger\.ln_q\.bias"):
        encoder_from_hf(made, config, {n: t for n, t in tensors.items() if n != "merger.ln_q.bias"})
    with pytest.raises(CheckpointError, match="more has no counterpart"):
        encoder_from_hf(made, config, tensors | {"more": tensors["merger.ln_q.bias"]})
    complete = model.config.to_dict()
    complete["vision_config"] |= {"hidden_act": "silu"}
    with pytest.raises(CheckpointError, match="hidden_act silu"):
        shape_of_config(complete)


def test_patches_that_do_not_fill_their_images_are_refused() -> None:
    made, _ = encoder(qwen())
    for grids in ([(1, 4, 6)], [(1, 5, 8)]):
        with pytest.raises(DataError, match="40 patches do not fill images of"):
            made(patches(), grids)


def random_encoder(groups: Any) -> Qwen2VLVisionModel:
    size = groups.tp.size()
    config = tiny_config(
        params_dtype=torch.float64,
        init_seed=5,
        init_method_std=0.2,
        tensor_model_parallel_size=size,
    )
    spec = get_vit_layer_with_local_spec(config)
    return Qwen2VLVisionModel(config, spec, SIDE, FRAMES, pg_collection=groups)


def computed(made: Qwen2VLVisionModel) -> list[Tensor]:
    found = made(patches(), GRIDS)
    found.square().sum().backward()
    grads = [made.conv1.weight.grad, made.ln_post.weight.grad]
    return [found.detach(), *(grad for grad in grads if grad is not None)]


def on_ranks(rank: int, world: int) -> list[Tensor]:
    return computed(random_encoder(create_process_groups(*make_grids(world, tp=world))))


def test_tensor_parallel_ranks_compute_what_one_does() -> None:
    wanted = computed(random_encoder(one_process_groups()))
    assert len(wanted) == 3
    for found in run_ranks(on_ranks, 2):
        for mine, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-9)
