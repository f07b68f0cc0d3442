"""Vision-language models of `transformers`: logits, gradients and tensors, both ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, DataError
from megatron.core.datasets.images import ImageSettings
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.tile_arrangement import TileArrangement
from megatron.training.arguments.parser import build_parser
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf_folder, vision_language
from megatron.training.conversion.convert import (
    BESIDE,
    ConversionRequest,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.vision_language import (
    VisionLanguageShape,
    config_of,
    export_tensors,
    flags_of,
    import_tensors,
    shape_of_config,
    with_attention_bias,
)
from megatron.training.models.registry import build_model_stage
from megatron.training.models.vlm import llava_arguments
from tests.support import tolerances
from tests.support.one_process import one_process_groups

IMAGE = DEFAULT_IMAGE_TOKEN_INDEX
VOCABULARY = 64
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SMALL, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
IMAGE_TOKEN = 60
OURS = "safetensors_dist"


SMALL_IMAGES = {"image_size": 12, "patch_size": 6}
GRIDS = {"image_grid_pinpoints": [[12, 24], [24, 12], [24, 24], [36, 12], [12, 36]]}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 12, "patch_size": 6}
WHOLE = {"vision_feature_select_strategy": "full"}
SQUARES = {"image_size": [24, 24], "patch_size": [6, 6]}


@dataclass(frozen=True)
class Case:
    """A model of `transformers`, and what its name does not say."""

    name: str  # of its classes
    text: str
    images: str
    sizes: dict[str, Any]
    whole: dict[str, Any]
    tokens_per_image: int


CASES = {
    "LLaVA-1.5": Case(*("Llava", "Llama", "CLIPVision", SMALL_IMAGES, {}, 4)),
    "LLaVA of Mistral, last layer, class token": Case(
        *("Llava", "Mistral", "CLIPVision", SMALL_IMAGES),
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        5,
    ),
    "LLaVA, tied": Case(
        *("Llava", "Llama", "CLIPVision", SMALL_IMAGES, {"tie_word_embeddings": True}, 4)
    ),
    "LLaVA of SigLIP": Case(*("Llava", "Qwen2", "SiglipVision", SMALL_IMAGES, WHOLE, 4)),
    "LLaVA of SigLIP, last layer, no head": Case(
        *("Llava", "Llama", "SiglipVision", SMALL_IMAGES | {"vision_use_head": False}),
        WHOLE | {"vision_feature_layer": -1},
        4,
    ),
    "InternVL of InternViT 300M": Case(
        *("InternVL", "Qwen2", "InternVLVision", SQUARES | {"attention_bias": True}),
        {"tie_word_embeddings": False},
        4,
    ),
    "InternVL of InternViT 6B, tied": Case(
        *("InternVL", "Qwen3", "InternVLVision"),
        SQUARES | {"use_qk_norm": True, "norm_type": "rms_norm"},
        {},
        4,
    ),
}


def theirs(case: Case) -> Any:
    """Return a random model of `transformers` in float32."""
    transformers = pytest.importorskip("transformers")
    more = {} if case.text == "Llama" else {"num_key_value_heads": 2}
    more |= {"head_dim": 8} if case.text == "Qwen3" else {}
    text = getattr(transformers, f"{case.text}Config")(**TEXT, **more)
    images = getattr(transformers, f"{case.images}Config")(
        **SMALL, num_hidden_layers=3, **case.sizes
    )
    config = getattr(transformers, f"{case.name}Config")(
        vision_config=images, text_config=text, image_token_id=IMAGE_TOKEN, **case.whole
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{case.name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def build(shape: VisionLanguageShape) -> LLaVAModel:
    """Build our model of ``shape`` from the flags that the conversion returns."""
    size = shape.text.vocab_size
    model = build_model_stage(
        run_of(shape), vocab_size=size, padded_vocab_size=size, groups=one_process_groups()
    )
    assert isinstance(model, LLaVAModel)
    return model.eval()


def run_of(shape: VisionLanguageShape) -> RunConfig:
    size = shape.text.vocab_size
    tokens = {"tokenizer_type": "NullTokenizer", "vocab_size": size - 1}
    return run_config(vars(build_parser().parse_args([])) | flags_of(shape) | tokens)


def ours(config: dict[str, Any], tensors: dict[str, Tensor]) -> LLaVAModel:
    shape = shape_of_config(config)
    model = build(shape)
    made = import_tensors(shape, as_lazy(tensors))
    model.load_state_dict({name: tensor.make() for name, tensor in made.items()})
    return model


def rows(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return our ids, theirs, and the images of a row with two images."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, IMAGE_TOKEN, (10,), generator=generator).tolist()
    ids[2] = ids[7] = IMAGE
    each = [[IMAGE_TOKEN] * case.tokens_per_image if i == IMAGE else [i] for i in ids]
    spread = [token for tokens in each for token in tokens]
    size = 12 if case.sizes["image_size"] == 12 else 24
    images = torch.randn(2, 3, size, size, generator=generator)
    return torch.tensor([ids]), torch.tensor([spread]), images


NEXT = Case(*("LlavaNext", "Mistral", "CLIPVision", SMALL_IMAGES), GRIDS, 4)


def arranged(sizes: list[tuple[int, int]]) -> list[TileArrangement]:
    """Return the arrangements of images of ``sizes`` (height, width)."""
    grids = tuple((h, w) for h, w in GRIDS["image_grid_pinpoints"])
    settings = ImageSettings(img_h=12, img_w=12, tiling="anyres", resolutions=grids)
    found = []
    for height, width in sizes:
        columns, rows = settings.grid(width, height)
        found.append(TileArrangement(rows, columns, height, width, side=2))
    return found


@pytest.mark.feature("Vision: LLaVA-NeXT has the logits and gradients of transformers' model")
@pytest.mark.parametrize("sizes", [[(20, 9), (24, 24)], [(7, 40), (13, 30)], [(100, 99), (5, 5)]])
def test_rows_of_tiles_are_those_of_llava_next(sizes: list[tuple[int, int]]) -> None:
    model = theirs(NEXT)
    config = model.config.to_dict()
    shape = shape_of_config(config)
    groups = {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
    arguments = llava_arguments(run_of(shape), **groups, groups=one_process_groups())
    mine = LLaVAModel(**arguments).eval()
    made = import_tensors(shape, as_lazy(model.state_dict()))
    mine.load_state_dict({name: tensor.make() for name, tensor in made.items()})
    tiles = arranged(sizes)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(t.num_tiles for t in tiles), 3, 12, 12, generator=generator)
    padded = torch.zeros(2, max(t.num_tiles for t in tiles), 3, 12, 12)
    for row, each in zip(padded, images.split([t.num_tiles for t in tiles]), strict=True):
        row[: len(each)] = each
    counts = iter(len(t.order) for t in tiles)
    ids = [3, IMAGE, 5, 9, IMAGE, 7]
    spread = [x for i in ids for x in ([IMAGE_TOKEN] * next(counts) if i == IMAGE else [i])]
    wanted = model(
        input_ids=torch.tensor([spread]),
        pixel_values=padded,
        image_sizes=torch.tensor(sizes),
        use_cache=False,
    ).logits
    found, _ = mine(images, torch.tensor([ids]), torch.arange(6)[None], arrangements=tiles)
    torch.testing.assert_close(found, wanted, **tolerances.LOGITS)
    grad = torch.randn(wanted.shape, generator=generator)
    wanted.backward(grad)
    found.backward(grad)
    gradient = model.model.image_newline.grad
    newline = mine.image_newline
    assert newline is not None
    assert newline.weight.grad is not None
    largest = gradient.abs().max()
    torch.testing.assert_close(
        newline.weight.grad[0] / largest, gradient / largest, **tolerances.LOGITS
    )
    back = {t.name: t.make() for t in export_tensors(shape, made)}
    assert torch.equal(back["image_newline"], model.model.image_newline)
    with pytest.raises(DataError, match="2 images have"):
        mine(images[:-1], torch.tensor([ids]), torch.arange(6)[None], arrangements=tiles)


@pytest.mark.feature("Vision: LLaVA-1.5 and InternVL have the logits of transformers' models")
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    case = CASES[name]
    model = theirs(case)
    config = model.config.to_dict()
    mine = ours(config, model.state_dict())
    ids, spread, images = rows(case)
    wanted = model(input_ids=spread, pixel_values=images, use_cache=False).logits
    found, _ = mine(images, ids, torch.arange(ids.shape[1])[None])
    torch.testing.assert_close(found, wanted, **tolerances.LOGITS)
    grad = torch.randn_like(wanted)
    wanted.backward(grad)
    found.backward(grad)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if config["tie_word_embeddings"]:
        gradients.pop("lm_head.weight", None)
    expected = import_tensors(shape_of_config(config), as_lazy(gradients))
    for each, param in mine.named_parameters():
        value = expected[each].make()
        if each.endswith("linear_qkv.bias") and not value.any():
            continue  # theirs has none
        assert param.grad is not None, each
        largest = value.abs().max()
        found = param.grad / largest
        wanted = value / largest
        torch.testing.assert_close(found, wanted, **tolerances.LOGITS, msg=each)


@pytest.mark.parametrize("name", [*CASES, "LLaVA-NeXT"])
def test_a_folder_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = theirs(CASES.get(name, NEXT))
    model.save_pretrained(tmp_path / "theirs")
    config = hf_folder.read_config(tmp_path / "theirs")
    shape = shape_of_config(config)
    tensors = import_tensors(shape, hf_folder.read_weights(tmp_path / "theirs"))
    with hf_folder.new_folder(tmp_path / "back") as folder:
        hf_folder.write_config(folder, config)
        hf_folder.write_weights(folder, export_tensors(shape, tensors), None)
    auto = transformers.AutoModelForImageTextToText
    back, info = auto.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    unread = (
        "post_layernorm",
        ".head.",
        *(f".layers.{n}." for n in range(3 - shape.num_unused_layers, 3)),
    )
    for each, tensor in model.state_dict().items():
        if "vision_tower" in each and any(part in each for part in unread):
            assert not back.state_dict()[each].any(), each
        else:
            assert torch.equal(back.state_dict()[each], tensor), each


def test_released_folders_are_read() -> None:
    case = CASES["LLaVA-1.5"]
    model = theirs(case)
    config = model.config.to_dict()
    shape = shape_of_config(config)
    tensors = import_tensors(shape, as_lazy(model.state_dict()))
    # As transformers before version 5 has written them, and folders on the hub have them.
    released = {t.name: t.make() for t in export_tensors(shape, tensors)}
    assert "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight" in released
    assert "language_model.model.layers.0.mlp.up_proj.weight" in released
    assert "language_model.lm_head.weight" in released
    again = import_tensors(shape, as_lazy(released))
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.make(), again[name].make()), name


def test_entries_that_a_released_folder_omits_have_the_defaults_of_their_class() -> None:
    transformers = pytest.importorskip("transformers")
    config = {
        "model_type": "llava",
        "image_token_index": 32000,
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 336},
    }
    shape = shape_of_config(config)
    whole = shape_of_config(transformers.LlavaConfig(**config).to_dict())
    assert shape.text == whole.text
    assert flags_of(shape) == flags_of(whole)
    flags = flags_of(shape)
    assert flags["vision_model_type"] == "clip"
    assert flags["vision_num_layers"] == 11
    assert flags["disable_vision_class_token"]
    assert (flags["img_h"], flags["patch_dim"]) == (336, 14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "blip"}, "model_type blip: the vision-language families are"),
        ({"text_config": None}, "no text_config"),
        ({"vision_config": {"model_type": "dinov9"}}, "vision_config has model_type dinov9"),
        (
            {"vision_config": SMALL_IMAGES | {"model_type": "vit"}},
            "vit: within Llava.* only clip",
        ),
        ({"vision_config": SIGLIP | SMALL}, "drops a class token"),
        ({"vision_feature_layer": [-2, -1]}, r"vision_feature_layer \[-2, -1\]: only one layer"),
        ({"vision_feature_layer": -9}, "vision_feature_layer -9"),
        ({"vision_feature_select_strategy": "mean"}, "vision_feature_select_strategy mean"),
        ({"model_type": "internvl", "image_token_id": 1, "downsample_ratio": 0.25}, "ratio 0.25"),
        ({"projector_hidden_act": "softsign"}, "projector_hidden_act softsign: only gelu"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias False: only True"),
    ],
)
def test_what_cannot_be_converted_is_refused(changes: dict[str, Any], message: str) -> None:
    config = theirs(CASES["LLaVA-1.5"]).config.to_dict()
    with pytest.raises(CheckpointError, match=message):
        shape_of_config(config | changes)


def test_tensors_that_are_missing_or_left_are_named() -> None:
    model = theirs(CASES["LLaVA-1.5"])
    shape = shape_of_config(model.config.to_dict())
    weights = as_lazy(model.state_dict())
    tensors = import_tensors(shape, weights)
    name = "model.multi_modal_projector.linear_1.bias"
    with pytest.raises(CheckpointError, match=r"no multi_modal_projector\.linear_1\.bias"):
        import_tensors(shape, {n: t for n, t in weights.items() if n != name})
    with pytest.raises(CheckpointError, match="more has no place in a LlavaFor"):
        import_tensors(shape, weights | {"more": weights[name]})
    with pytest.raises(CheckpointError, match="does not hold a LlavaFor.*more"):
        export_tensors(shape, tensors | {"more": tensors["vision_model.conv1.weight"]})


@pytest.mark.feature("Checkpoints: complete vision-language models to Hugging Face and back")
@pytest.mark.parametrize("name", [*CASES, "LLaVA-NeXT"])
def test_the_converter_compares_logits_and_restores_config_json(name: str, tmp_path: Path) -> None:
    theirs(CASES.get(name, NEXT)).save_pretrained(tmp_path / "theirs")
    said: list[str] = []
    for source, target, form in (("theirs", "ours", OURS), ("ours", "back", "hf")):
        convert(
            ConversionRequest(source=tmp_path / source, target=tmp_path / target, format=form),
            said.append,
        )
    compared = [line for line in said if line.startswith("the logits of 3 prompts agree")]
    assert len(compared) == 2, said
    config, back = (hf_folder.read_config(tmp_path / each) for each in ("theirs", "back"))
    assert back == config


def test_torch_dist_keeps_all_names(tmp_path: Path) -> None:
    model = theirs(CASES["LLaVA-1.5"])
    model.save_pretrained(tmp_path / "theirs")
    for source, target, each in (
        ("theirs", "between", "torch_dist"),
        ("between", "ours", OURS),
    ):
        convert(
            ConversionRequest(
                source=tmp_path / source, target=tmp_path / target, format=each, verify=False
            ),
            lambda line: None,
        )
    shape = shape_of_config(model.config.to_dict())
    wanted = import_tensors(shape, as_lazy(model.state_dict()))
    found = read_source(
        ConversionRequest(source=tmp_path / "ours", target=tmp_path / "back", format="hf")
    ).tensors
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].make()[: tensor.shape[0]], tensor.make()), name
    said: list[str] = []
    arguments = {"source": tmp_path / "between", "target": tmp_path / "back", "format": "hf"}
    convert(ConversionRequest(**arguments), said.append)
    assert any(line.startswith("the logits of 3 prompts agree") for line in said)


@pytest.mark.parametrize("form", ["torch", "torch_dcp"])
def test_formats_without_an_encoder_are_refused(form: str, tmp_path: Path) -> None:
    theirs(CASES["LLaVA-1.5"]).save_pretrained(tmp_path / "theirs")
    request = ConversionRequest(
        source=tmp_path / "theirs", target=tmp_path / "ours", format=form, verify=False
    )
    with pytest.raises(CheckpointError, match=f"--format {form} stores the modules of a language"):
        convert(request, lambda line: None)


def test_an_encoder_that_has_learned_biases_gets_them() -> None:
    model = theirs(CASES["InternVL of InternViT 6B, tied"])
    config = model.config.to_dict()
    tensors = import_tensors(shape_of_config(config), as_lazy(model.state_dict()))
    assert not with_attention_bias(config, tensors)["vision_config"]["attention_bias"]
    name = "vision_model.decoder.layers.1.self_attention.linear_qkv.bias"
    tensors |= as_lazy({name: torch.ones(tensors[name].shape)})
    config = with_attention_bias(config, tensors)
    found = {t.name: t.make() for t in export_tensors(shape_of_config(config), tensors)}
    assert found["vision_tower.encoder.layer.1.attention.q_proj.bias"].all()
    assert not found["vision_tower.encoder.layer.0.attention.q_proj.bias"].any()


def test_a_model_without_config_json_gets_one(tmp_path: Path) -> None:
    for name in CASES:
        case = CASES[name]
        model = theirs(case)
        folder = tmp_path / name.replace(" ", "_")
        model.save_pretrained(folder / "theirs")
        arguments = {"source": folder / "theirs", "target": folder / "ours", "format": OURS}
        convert(ConversionRequest(**arguments, verify=False), lambda line: None)
        (folder / "ours" / BESIDE / "config.json").unlink()
        arguments = {"source": folder / "ours", "target": folder / "back", "format": "hf"}
        with pytest.raises(CheckpointError, match="the tokenizer has no token <image>"):
            convert(ConversionRequest(**arguments), lambda line: None)


def test_a_new_config_json_describes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_language, "image_token", lambda run: IMAGE_TOKEN)
    for case in CASES.values():
        shape = shape_of_config(theirs(case).config.to_dict())
        run = run_of(shape)
        again = shape_of_config(config_of(run, shape.text.vocab_size, {}))
        lengths = dict.fromkeys(
            ("max_position_embeddings", "seq_length")
        )  # with images' embeddings
        assert flags_of(again) | lengths == flags_of(shape) | lengths
        assert again.image_token == IMAGE_TOKEN
