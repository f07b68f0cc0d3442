"""Vision encoders: features and gradients of `transformers`, conversion, tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, ConfigError, DataError
from megatron.core.models.mimo.submodules.audio import WhisperEncoderModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.training.conversion.vision import CLIP
from tests.support import tolerances
from tests.support.encoders import Encoder, built, encoder_from_hf, encoder_to_hf
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks
from tests.support.transformers_release import need_tested_release

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SQUARE = {"image_size": 24, "patch_size": 6}
WIDE = {"image_size": [12, 24], "patch_size": [6, 6]}
PAIRS = {"image_size": [24, 24], "patch_size": [6, 6]}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIP": ("CLIPVision", SQUARE),
    "SigLIP": ("SiglipVision", SQUARE),
    "ViT": ("ViT", WIDE),
    "InternViT 300M": ("InternVLVision", PAIRS | {"attention_bias": True}),
    "InternViT 6B": (
        "InternVLVision",
        PAIRS | {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False},
    ),
    "RADIO": ("Radio", {"patch_size": 6, "max_img_size": 48, "mlp_ratio": 1.5}),
    "RADIO of its largest image": ("Radio", {"patch_size": 6, "max_img_size": 24}),
    "Whisper": ("Whisper", {}),
}
# Tensors of transformers' models that do not belong to the encoder, or never change.
OUTSIDE = (
    *("post_layernorm", "head.", "pooler.", "summary_idxs"),
    *("input_conditioner.", "embed_positions."),
)
OF_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 10,
    "max_source_positions": 14,
    "decoder_attention_heads": 4,
    "decoder_layers": 1,
}


EXACT = {"rtol": 1e-9, "atol": 1e-9}  # float64: only the order of sums differs


def theirs(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    kind, sizes = ENCODERS[name]
    if kind == "Radio":
        need_tested_release("RADIO has other names of tensors")
    given = {n: v for n, v in SIZES.items() if kind != "Radio" or n != "intermediate_size"}
    given = OF_WHISPER if kind == "Whisper" else given
    config = getattr(transformers, f"{kind}Config")(**given, **sizes)
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model = model.encoder if kind == "Whisper" else model
    with torch.no_grad():
        for param in model.parameters():
            if not param.requires_grad:
                continue  # fixed positions
            param.add_(0.1 * torch.randn_like(param))
    if kind == "Radio":
        model.make_preprocessor_external()  # images are normalized before
    return model.double()


def ours(model: Any, **changes: Any) -> Encoder:
    config = model.config.to_dict()
    changes = {"params_dtype": torch.float64, **changes}
    made = built(config, one_process_groups(), **changes)
    made.load_state_dict(encoder_from_hf(made, config, model.state_dict()))
    return made.eval()


def images(model: Encoder, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, WhisperEncoderModel):
        size = (count, model.num_mel_bins, 2 * model.seq_length)
        return torch.randn(size, generator=generator, dtype=torch.float64)
    size = (24, 12) if isinstance(model, RADIOViTModel) else (model.img_h, model.img_w)
    if isinstance(model, RADIOViTModel) and model.num_rows == 4:
        size = (24, 24)
    return torch.randn(count, 3, *size, generator=generator, dtype=torch.float64)


@pytest.mark.feature("Vision: encoders have the features and gradients of transformers' models")
@pytest.mark.parametrize("name", ENCODERS)
def test_features_and_gradients_are_those_of_transformers(name: str) -> None:
    hf = theirs(name)
    model = ours(hf)
    x = images(model).requires_grad_()
    y = x.detach().clone().requires_grad_()
    found = model(x)
    wanted = hf(y).last_hidden_state
    # RMS norms, interpolated positions and waves of transformers are computed in float32.
    is_rounded = name in ("InternViT 6B", "Whisper") or name.startswith("RADIO")
    tolerance = tolerances.LOGITS if is_rounded else EXACT
    torch.testing.assert_close(found, wanted, **tolerance)
    grad = torch.randn_like(wanted)
    found.backward(grad)
    wanted.backward(grad)
    torch.testing.assert_close(x.grad, y.grad, **tolerance)
    gradients = {n: p.grad for n, p in hf.named_parameters() if p.grad is not None}
    mine = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = encoder_from_hf(model, hf.config.to_dict(), gradients)
    assert set(mine) == set(expected)
    for each, value in expected.items():
        if not (each.endswith("linear_qkv.bias") and not value.any()):  # theirs has none
            torch.testing.assert_close(mine[each], value, **tolerance, msg=each)


@pytest.mark.parametrize("name", ENCODERS)
def test_tensors_come_back_bit_by_bit(name: str) -> None:
    hf = theirs(name)
    model = ours(hf)
    config = hf.config.to_dict()
    back = encoder_to_hf(model, config, model.state_dict())
    left = set(hf.state_dict()) - set(back)
    assert all(n.startswith(OUTSIDE) for n in left), left
    for each, value in back.items():
        assert torch.equal(value, hf.state_dict()[each]), each


def test_a_tensor_that_does_not_fit_is_named() -> None:
    hf = theirs("CLIP")
    config = hf.config.to_dict()
    model = ours(hf)
    name = "encoder.layers.1.mlp.fc1.weight"
    whole = hf.state_dict()
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        encoder_from_hf(model, config, {n: t for n, t in whole.items() if n != name})
    with pytest.raises(CheckpointError, match=rf"{name} \[47, 32\]: config.json asks"):
        encoder_from_hf(model, config, whole | {name: whole[name][:-1]})
    with pytest.raises(CheckpointError, match=r"extra\.weight has no counterpart"):
        encoder_from_hf(model, config, whole | {"extra.weight": whole[name]})
    with pytest.raises(CheckpointError, match="hidden_act softsign: only quick_gelu"):
        CLIP.flags(config | {"hidden_act": "softsign"})


def encoder(groups: Any, subtype: str, **changes: Any) -> CLIPViTModel:
    config = tiny_config(
        **{"init_method_std": 0.1, "init_seed": 5, "params_dtype": torch.float64, **changes}
    )
    spec = get_vit_layer_with_local_spec(config, has_layer_scale=subtype == "internvit")
    return CLIPViTModel(
        config, spec, patch_dim=6, img_h=12, img_w=24, model_subtype=subtype, pg_collection=groups
    )


def on_ranks(rank: int, world: int, subtype: str, changes: dict[str, Any]) -> list[Any]:
    groups = create_process_groups(*make_grids(world, tp=world))
    return computed(encoder(groups, subtype, tensor_model_parallel_size=world, **changes))


def computed(model: CLIPViTModel) -> list[Any]:
    """Features, and gradients of what every rank holds completely."""
    x = images(model).requires_grad_()
    found = model(x)
    found.square().sum().backward()
    whole = [model.conv1.weight, model.position_embeddings.weight, model.class_token]
    return [found.detach(), x.grad, *(p.grad for p in whole if p is not None)]


@pytest.mark.feature("Vision: an encoder on several tensor-parallel ranks computes as one process")
@pytest.mark.parametrize(
    ("subtype", "changes"),
    [("clip", {}), ("internvit", {}), ("siglip", {"sequence_parallel": True})],
)
def test_tensor_parallel_ranks_compute_what_one_does(subtype: str, changes: dict[str, Any]) -> None:
    wanted = computed(encoder(one_process_groups(), subtype))
    for found in run_ranks(on_ranks, 2, subtype, changes):
        for mine, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, one, **EXACT)


def test_all_problems_of_an_encoder_are_reported() -> None:
    config = tiny_config()
    with pytest.raises(ConfigError, match=r"(?s)flower is unknown.*--img-h 13.*--img-w 20"):
        CLIPViTModel(
            config,
            get_vit_layer_with_local_spec(config),
            patch_dim=6,
            img_h=13,
            img_w=20,
            model_subtype="flower",
            pg_collection=one_process_groups(),
        )


def test_images_of_another_size_are_refused() -> None:
    model = encoder(one_process_groups(), "clip")
    with pytest.raises(DataError, match=r"\(3, 12, 12\) do not fit .*\(3, 12, 24\)"):
        model(torch.zeros(1, 3, 12, 12))


def test_images_that_patches_do_not_fill_are_refused() -> None:
    model = ours(theirs("RADIO"))
    with pytest.raises(DataError, match="12 x 20 pixels are not a multiple of --patch-dim 6"):
        model(torch.zeros(1, 3, 12, 20, dtype=torch.float64))
