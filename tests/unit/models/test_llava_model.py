"""LLaVA: the logits of transformers' model, positions of images, layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.activations import quick_gelu
from megatron.core.config.errors import DataError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.models.multimodal.splicing import IGNORE_INDEX, splice
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from tests.support import tolerances
from tests.support.conversion_names import in_our_names
from tests.support.encoders import encoder_from_hf
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

IMAGE = DEFAULT_IMAGE_TOKEN_INDEX
VOCABULARY = 64
EXACT = {"rtol": 1e-9, "atol": 1e-9}
PROJECTION = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)


def llava(groups: Any, *, vision: Any = None, language: Any = None, **changes: Any) -> LLaVAModel:
    shared = {"params_dtype": torch.float64, "bias_activation_fusion": False, "init_seed": 5}
    shared["tensor_model_parallel_size"] = groups.tp.size()
    of_text = tiny_config(**shared, init_method_std=0.2, **(language or {}))
    of_images = tiny_config(**shared, init_method_std=0.2, **(vision or {}))
    between = tiny_config(**shared, init_method_std=0.2, ffn_hidden_size=32)
    given = {"img_h": 12, "img_w": 12, "patch_dim": 6, "position_embedding_type": "rope"}
    return LLaVAModel(
        of_text,
        get_gpt_layer_local_spec(config=of_text),
        VOCABULARY,
        48,
        of_images,
        get_vit_layer_with_local_spec(of_images),
        True,
        between,
        PROJECTION,
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
        **(given | changes),
    )


def batch() -> dict[str, Tensor]:
    """Two rows: two images of one and two tiles, and no image."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, 10), generator=generator)
    labels = ids.roll(-1, 1)
    ids[0, 0] = ids[0, 5] = IMAGE
    labels[0, 4] = labels[0, 9] = 0  # of an image, and of no token
    return {
        "images": torch.randn(3, 3, 12, 12, generator=generator, dtype=torch.float64),
        "input_ids": ids,
        "position_ids": torch.arange(10).expand(2, -1),
        "labels": labels,
        "loss_mask": torch.ones(2, 10),
        "num_image_tiles": torch.tensor([1, 2]),
    }


def test_images_take_their_places() -> None:
    is_image = torch.tensor([[True, False, True, False], [False, False, False, True]])
    found = splice(is_image, is_image * torch.tensor([[2, 9, 3, 9], [9, 9, 9, 1]]))
    text = torch.arange(8.0).view(2, 4, 1)
    images = torch.arange(100.0, 106.0).view(6, 1)
    wanted = [[100, 101, 1, 102, 103, 104, 3], [4, 5, 6, 105, 0, 0, 0]]
    assert found.embeddings(text, images).squeeze(-1).tolist() == wanted
    labels = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    none = IGNORE_INDEX
    assert found.labels(labels).tolist() == [
        [none, none, 11, none, none, none, 13],
        [20, 21, 22, none, none, none, none],
    ]
    mask = found.loss_mask(torch.ones(2, 4)).tolist()
    assert mask == [[0, 0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0]]
    short = splice(is_image, is_image * torch.tensor([[2, 9, 3, 9], [9, 9, 9, 1]]), 4)
    assert short.embeddings(text, images).squeeze(-1).tolist() == [row[:4] for row in wanted]


@pytest.mark.feature("Vision: LLaVA has the logits and gradients of transformers' model")
def test_logits_and_gradients_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    text = transformers.LlamaConfig(
        **small, num_hidden_layers=2, vocab_size=VOCABULARY, max_position_embeddings=48,
        tie_word_embeddings=False,
    )  # fmt: skip
    seen = transformers.CLIPVisionConfig(**small, num_hidden_layers=3, image_size=12, patch_size=6)
    config = transformers.LlavaConfig(
        vision_config=seen, text_config=text, image_token_id=60, vision_feature_layer=-2
    )
    torch.manual_seed(3)
    hf = transformers.LlavaForConditionalGeneration(config).eval().double()
    with torch.no_grad():
        for param in hf.parameters():
            param.add_(0.1 * torch.randn_like(param))
    gated = {
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm", "add_bias_linear": False, "ffn_hidden_size": 48,
        "layernorm_epsilon": text.rms_norm_eps,
    }  # fmt: skip
    of_clip = {"activation_func": quick_gelu, "ffn_hidden_size": 48, "num_layers": 2}
    ours = llava(one_process_groups(), vision=of_clip, language=gated).eval()
    ours.load_state_dict(state(ours, hf, dict(hf.state_dict())))
    given = batch()
    ids = given["input_ids"].clamp(max=59)
    ids[given["input_ids"] == IMAGE] = IMAGE
    images = given["images"]
    expanded = torch.tensor([spread(row) for row in ids.tolist()[:1]])
    wanted = hf(input_ids=expanded, pixel_values=images[:2]).logits
    ids = torch.tensor([ids[0].tolist()])
    found, _ = ours(images[:2], ids, torch.arange(10)[None])
    torch.testing.assert_close(found, wanted, **tolerances.LOGITS)
    grad = torch.randn_like(wanted)
    wanted.backward(grad)
    found.backward(grad)
    gradients = {n: p.grad for n, p in hf.named_parameters() if p.grad is not None}
    expected = state(ours, hf, gradients)
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], **tolerances.LOGITS, msg=name)


def spread(row: list[int]) -> list[int]:
    """Repeat the token of an image for each of its four patches, as transformers expects."""
    return [each for token in row for each in ([60] * 4 if token == IMAGE else [token])]


def state(ours: LLaVAModel, hf: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors, or gradients, of ``hf`` under our names."""
    tower = "model.vision_tower."
    text = "model.language_model."
    of_text = {
        n.replace(text, "model."): t for n, t in tensors.items() if n.startswith((text, "lm_head."))
    }
    named = {
        f"language_model.{n}": t for n, t in in_our_names(hf.model.language_model, of_text).items()
    }
    of_tower = {n.removeprefix(tower): t for n, t in tensors.items() if n.startswith(tower)}
    of_tower = {n: t for n, t in of_tower.items() if ".layers.2." not in n}  # its output is unused
    assert ours.vision_model is not None
    found = encoder_from_hf(ours.vision_model, hf.config.vision_config.to_dict(), of_tower)
    named |= {f"vision_model.{n}": t for n, t in found.items()}
    for mine, their in (("linear_fc1", "linear_1"), ("linear_fc2", "linear_2")):
        for kind in ("weight", "bias"):
            theirs = tensors[f"model.multi_modal_projector.{their}.{kind}"]
            named[f"vision_projection.encoder.{mine}.{kind}"] = theirs
    return named


def computed(model: LLaVAModel) -> list[Tensor]:
    losses, mask = model(**batch())
    (losses * mask).sum().backward()
    assert model.vision_model is not None
    grads = [
        model.vision_model.conv1.weight.grad,
        model.vision_model.position_embeddings.weight.grad,
    ]
    return [losses.detach(), mask, *(g for g in grads if g is not None)]


def on_ranks(rank: int, world: int, language: dict[str, Any]) -> list[Tensor]:
    groups = create_process_groups(*make_grids(world, tp=world))
    return computed(llava(groups, language=language))


@pytest.mark.feature("Vision: LLaVA on several tensor-parallel ranks computes as one process")
@pytest.mark.parametrize("language", [{}, {"sequence_parallel": True}])
def test_tensor_parallel_ranks_compute_what_one_does(language: dict[str, Any]) -> None:
    wanted = computed(llava(one_process_groups()))
    length = wanted[0].shape[1]
    for found in run_ranks(on_ranks, 2, language):
        cut = [found[0][:, :length], found[1][:, :length], *found[2:]]
        for mine, one in zip(cut, wanted, strict=True):
            torch.testing.assert_close(mine, one, **EXACT)


@pytest.mark.feature("Vision: LLaVA in two pipeline stages computes as one process")
def test_two_pipeline_stages_compute_what_one_does() -> None:
    wanted = computed(llava(one_process_groups()))
    sizes = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float64}
    first, last = (
        llava(
            replace(one_process_groups(), pp=torch.distributed.ProcessGroup(rank, 2)),
            language=sizes,
            pre_process=rank == 0,
            post_process=rank == 1,
        )
        for rank in range(2)
    )
    assert last.vision_model is None
    given = batch()
    hidden, _ = first(**given)
    received = hidden.detach().requires_grad_()
    last.set_input_tensor([received])
    losses, mask = last(**(given | {"images": None}))
    (losses * mask).sum().backward()
    hidden.backward(received.grad)
    length = wanted[0].shape[1]
    assert losses.shape == (2, 48)  # stages exchange one shape
    assert first.vision_model is not None
    found = [losses[:, :length], mask[:, :length], first.vision_model.conv1.weight.grad]
    for mine, one in zip(found, wanted, strict=False):
        torch.testing.assert_close(mine, one, **EXACT)
    assert not mask[:, length:].any()


def test_text_alone_gives_every_parameter_a_gradient() -> None:
    model = llava(one_process_groups())
    given = batch()
    given["input_ids"] = given["input_ids"].clamp(min=0)
    losses, _ = model(**(given | {"images": None, "num_image_tiles": None}))
    losses.sum().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        is_of_images = name.startswith("vision")
        assert bool(param.grad.any()) != is_of_images, name


@pytest.mark.feature("Vision: frozen parts stay as they are, the others learn (--freeze-LM)")
@pytest.mark.parametrize("part", ["language_model", "vision_model", "vision_projection"])
def test_frozen_parts_get_no_gradients(part: str) -> None:
    model = llava(one_process_groups())
    parts = ("language_model", "vision_model", "vision_projection")
    model.freeze(*(each == part for each in parts))
    losses, mask = model(**batch())
    (losses * mask).sum().backward()
    for name, param in model.named_parameters():
        assert (param.grad is None) == name.startswith(f"{part}."), name


def test_tiles_without_a_place_are_refused() -> None:
    model = llava(one_process_groups())
    with pytest.raises(DataError, match="places for 12 embeddings of images, and 2 tiles have 8"):
        model(**(batch() | {"images": torch.zeros(2, 3, 12, 12)}))


def test_ranks_that_exchange_tokens_of_experts_have_rows_of_one_length() -> None:
    groups = one_process_groups()
    assert llava(groups)(**batch())[0].shape[1] < 48  # as long as its longest row
    groups = replace(groups, ep=torch.distributed.ProcessGroup(0, 2))
    assert llava(groups)(**batch())[0].shape == (2, 48)


def on_parts_of_rows(rank: int, world: int) -> list[Tensor]:
    groups = create_process_groups(*make_grids(world, cp=world))
    found = computed(llava(groups, language={"context_parallel_size": world}))
    for grad in found[2:]:
        torch.distributed.all_reduce(grad)
    return found


@pytest.mark.feature("Vision: LLaVA on several context-parallel ranks computes as one process")
def test_context_parallel_ranks_compute_what_one_does() -> None:
    wanted = computed(llava(one_process_groups()))
    found = run_ranks(on_parts_of_rows, 2)
    masked = wanted[0] * wanted[1]
    total = sum((each[0] * each[1]).sum() for each in found)
    torch.testing.assert_close(total, masked.sum(), **EXACT)
    for each in found:
        for mine, one in zip(each[2:], wanted[2:], strict=True):
            torch.testing.assert_close(mine, one, **EXACT)
