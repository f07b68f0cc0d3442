"""MiMo: places of embeddings, hand-assembled models, layouts, encoders on grids of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo import (
    AudioModalitySubmodules,
    MimoModel,
    MimoModelConfig,
    VisionModalitySubmodules,
)
from megatron.core.models.mimo.submodules.audio import WhisperEncoderModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector, get_projector_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.optimizer.clip_grads import counts_here
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import info_of
from megatron.core.transformer.spec_utils import ModuleSpec
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

IMAGE = 64
SOUND = 65  # outside of the vocabulary
SPECIAL = {"images": IMAGE, "audios": SOUND}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
NUM_PATCHES = 4
NUM_FRAMES = 3  # embeddings of an image, and of a sound
LENGTH = 16


def mimo(
    groups: Any, *, encoder_groups: Any = None, language: dict[str, Any] | None = None, **stage: Any
) -> MimoModel:
    """A model of images and sound; the encoders and projections have ``encoder_groups``."""
    of_encoders = encoder_groups or groups.without_context_parallelism()
    shared: dict[str, Any] = {"params_dtype": torch.float64, "init_method_std": 0.2, "init_seed": 5}
    shared["bias_activation_fusion"] = False
    of_text = tiny_config(**shared, tensor_model_parallel_size=groups.tp.size(), **(language or {}))
    shared["tensor_model_parallel_size"] = of_encoders.tp.size()
    small = tiny_config(**shared, num_layers=1)
    between = tiny_config(**shared, ffn_hidden_size=32)
    layers = get_vit_layer_with_local_spec(small)
    encoder = {
        "transformer_config": small,
        "transformer_layer_spec": layers,
        "pg_collection": of_encoders,
    }
    sizes = {"img_h": 12, "img_w": 12, "patch_dim": 6, "drop_class_token": True}
    of_sound = {"num_mel_bins": 5, "max_source_positions": NUM_FRAMES}
    projection = ModuleSpec(
        MultimodalProjector,
        {"config": between, "projector_type": "mlp", "input_size": 32, "tp_group": of_encoders.tp},
        get_projector_spec(),
    )
    text = {
        "config": of_text,
        "transformer_layer_spec": get_gpt_layer_local_spec(config=of_text),
        "vocab_size": 64,
        "max_sequence_length": LENGTH,
        "position_embedding_type": "learned_absolute",
        "pg_collection": groups,
        **stage,
    }
    parts = {
        "images": ModuleSpec(
            VisionModalitySubmodules,
            submodules={
                "encoders": {"clip": ModuleSpec(CLIPViTModel, {**encoder, **sizes})},
                "input_projections": [projection],
            },
        ),
        "audios": ModuleSpec(
            AudioModalitySubmodules,
            submodules={
                "encoders": {"whisper": ModuleSpec(WhisperEncoderModel, {**encoder, **of_sound})},
                "input_projections": [projection],
            },
        ),
    }
    return MimoModel(MimoModelConfig(ModuleSpec(GPTModel, text), parts, SPECIAL))


def batch() -> dict[str, Any]:
    """Two rows: two images in the first, a sound in each, and text between them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (2, LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    ids[0, 1:9] = IMAGE
    ids[0, 10:13] = SOUND
    ids[1, 4:7] = SOUND
    images = torch.randn(2, 3, 12, 12, generator=generator, dtype=torch.float64)
    sounds = torch.randn(2, 5, 2 * NUM_FRAMES, generator=generator, dtype=torch.float64)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(LENGTH).expand(2, -1),
        "labels": labels,
        "loss_mask": (ids < 64).double(),
        "modality_inputs": {
            "images": {"clip": {"x": images}},
            "audios": {"whisper": {"x": sounds}},
        },
    }


def gradients(model: MimoModel) -> dict[str, Tensor]:
    losses, mask = model(**batch())
    (losses * mask).sum().backward()
    return named(model) | {"loss": (losses * mask).sum().detach()}


def named(model: MimoModel) -> dict[str, Tensor]:
    return {info_of(p).name: p.grad for p in model.parameters() if p.grad is not None}


@pytest.mark.feature("MiMo: embeddings are placed at the positions of special tokens")
def test_embeddings_take_the_places_of_their_tokens() -> None:
    model = mimo(one_process_groups())
    ids = torch.tensor([[IMAGE, 7, SOUND], [8, IMAGE, 9]])
    found = {
        "images": torch.tensor([[1.0], [2.0]]),
        "audios": torch.tensor([[3.0]]),
        "text": torch.tensor([[70.0], [80.0], [90.0]]),
    }
    aligned = model.align_embeddings_by_token_positions(found, ids, SPECIAL)
    assert aligned.squeeze(-1).T.tolist() == [[1, 70, 3], [80, 2, 90]]
    found["audios"] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="have 1 tokens of the modality audios, and it has 2"):
        model.align_embeddings_by_token_positions(found, ids, SPECIAL)
    with pytest.raises(ValueError, match="no embeddings"):
        model.align_embeddings_by_token_positions({}, ids, SPECIAL)


@pytest.mark.feature("MiMo: images and sound together have the gradients of a model put by hand")
def test_losses_and_gradients_are_those_of_parts_put_together_by_hand() -> None:
    found = gradients(mimo(one_process_groups()))
    model = mimo(one_process_groups())
    given = batch()
    parts: Any = model.modality_submodules
    seen = parts["images"].encoders["clip"](given["modality_inputs"]["images"]["clip"]["x"])
    heard = parts["audios"].encoders["whisper"](given["modality_inputs"]["audios"]["whisper"]["x"])
    assert seen.shape == (2, NUM_PATCHES, 32)
    seen = parts["images"].input_projections[0](seen)
    heard = parts["audios"].input_projections[0](heard)
    text = model.get_text_embeddings(given["input_ids"], given["position_ids"], SPECIAL)
    rows = [
        [text[:1], seen[0], seen[1], text[1:2], heard[0], text[2:5]],
        [text[5:9], heard[1], text[9:]],
    ]
    combined = torch.stack([torch.cat(row) for row in rows], 1)
    losses = model.language_model(None, None, None, decoder_input=combined, labels=given["labels"])
    loss = (losses * given["loss_mask"]).sum()
    loss.backward()
    wanted = named(model) | {"loss": loss.detach()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **EXACT, msg=name)
    first = {name.split(".decoder.")[0] for name in found if ".decoder." in name}
    assert first == {
        "language_model",
        "modality_submodules.audios.encoders.whisper",
        "modality_submodules.images.encoders.clip",
    }


def test_text_alone_gives_every_parameter_a_gradient() -> None:
    model = mimo(one_process_groups())
    given = batch()
    given["input_ids"] = given["input_ids"].clamp(max=63)
    none = {"images": {"clip": {"x": torch.zeros(0, 3, 12, 12)}}}
    none["audios"] = {"whisper": {"x": torch.zeros(0, 5, 2 * NUM_FRAMES)}}
    losses, _ = model(**(given | {"modality_inputs": none}))
    losses.sum().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert bool(param.grad.any()) == name.startswith("language_model."), name
    again = mimo(one_process_groups())(**(given | {"modality_inputs": None}))[0]
    assert torch.equal(losses, again)


@pytest.mark.parametrize("part", ["language_model", "encoders", "projections"])
def test_frozen_parts_get_no_gradients(part: str) -> None:
    model = mimo(one_process_groups())
    model.freeze(**{part: True})
    gradients(model)
    for name, param in model.named_parameters():
        assert (param.grad is None) == (part in name), name


def test_videos_have_the_embeddings_of_their_frames() -> None:
    encoder: Any = mimo(one_process_groups()).modality_submodules["images"]
    frames = torch.randn(6, 3, 12, 12, dtype=torch.float64)
    video = frames.view(2, 3, 3, 12, 12)
    one = encoder({"clip": {"x": frames}})
    other = encoder({"clip": {"x": video}})
    assert torch.equal(one, other)
    assert one.shape == (6 * NUM_PATCHES, 32)


def test_decoders_read_projected_embeddings() -> None:
    parts = VisionModalitySubmodules(
        decoders={"pixels": nn.Linear(3, 2)}, output_projections=[nn.Linear(4, 3)]
    )
    given = torch.randn(5, 4)
    wanted = parts.decoders["pixels"](parts.output_projections[0](given))
    assert torch.equal(parts.decode(given, {}), wanted)
    assert parts({}) is None
    with pytest.raises(ConfigError, match="input_projections has 2; give one"):
        AudioModalitySubmodules(input_projections=[nn.Identity(), nn.Identity()])
    with pytest.raises(DataError, match="inputs of the encoder clap; the modality has"):
        parts.encode({"clap": {}})


def test_a_modality_needs_a_token() -> None:
    language = mimo(one_process_groups()).mimo_config.language_model_spec
    spec = ModuleSpec(VisionModalitySubmodules)
    with pytest.raises(ConfigError, match="no token for the modality images"):
        MimoModel(MimoModelConfig(language, {"images": spec}, {}))
    with pytest.raises(DataError, match="modality_inputs has smell"):
        mimo(one_process_groups())(**(batch() | {"modality_inputs": {"smell": {}}}))


def in_layout(
    rank: int, world: int, degrees: dict[str, int], language: dict[str, Any], encoder_tp: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients of this rank as parts of the complete ones, and names of those that it counts."""
    groups = create_process_groups(*make_grids(world, **degrees))
    own = groups.without_context_parallelism()
    if encoder_tp:
        grid = HyperCommGrid([encoder_tp, world // encoder_tp], ["tp", "copies"])
        tp = grid.create_pg("tp")
        assert tp is not None
        own = own.with_tensor_parallelism(tp)
    sizes = {"context_parallel_size": degrees.get("cp", 1)}
    model = mimo(groups, encoder_groups=own, language=sizes | language)
    found = gradients(model)
    loss = found.pop("loss")
    if groups.cp.size() > 1:
        for value in (loss, *found.values()):
            torch.distributed.all_reduce(value)
    if groups.tp.size() > 1 and language.get("sequence_parallel"):
        for param in model.parameters():
            if info_of(param).sequence_parallel:
                torch.distributed.all_reduce(param.grad)
    infos = [info_of(param) for param in model.parameters()]
    whole = {"loss": loss}
    for info in infos:
        whole[info.name] = torch.zeros(info.global_shape, dtype=torch.float64)
        for index, view in info.pieces(found[info.name]):
            box = tuple(slice(i, i + n) for i, n in zip(index, view.shape, strict=True))
            whole[info.name][box] = view
    return whole, [info.name for info in infos if counts_here(info, groups)]


@pytest.mark.feature("MiMo: encoders have a tensor-parallel size of their own (HyperCommGrid)")
@pytest.mark.parametrize(
    ("world", "degrees", "language", "encoder_tp"),
    [
        (2, {"tp": 2}, {}, 0),
        (2, {"tp": 2}, {"sequence_parallel": True}, 0),
        (2, {"cp": 2}, {}, 0),
        (2, {"tp": 2}, {}, 1),
        (4, {"tp": 4}, {"sequence_parallel": True}, 2),
    ],
)
def test_ranks_compute_what_one_process_does(
    world: int, degrees: dict[str, int], language: dict[str, Any], encoder_tp: int
) -> None:
    wanted = gradients(mimo(one_process_groups()))
    ranks = run_ranks(in_layout, world, degrees, language, encoder_tp)
    whole: dict[str, Tensor] = {}
    for found, counted in ranks:
        torch.testing.assert_close(found["loss"], wanted["loss"], **EXACT)
        for name in counted:
            whole[name] = whole.get(name, 0) + found[name]
    for name, value in wanted.items():
        if name != "loss":
            times = degrees.get("cp", 1)  # every context-parallel rank counts its copy
            torch.testing.assert_close(whole[name], value * times, **EXACT, msg=name)


def too_wide(rank: int, world: int) -> str:
    groups = create_process_groups(*make_grids(world))
    wide = HyperCommGrid([world], ["tp"]).create_pg("tp")
    assert wide is not None
    try:
        mimo(groups, encoder_groups=groups.with_tensor_parallelism(wide))
    except ConfigError as error:
        return str(error)
    return ""


def test_encoders_are_not_sharded_over_more_ranks_than_the_language_model() -> None:
    for said in run_ranks(too_wide, 2):
        assert "tensor-parallel size 2 does not divide that of the language model, 1" in said


def test_two_pipeline_stages_compute_what_one_does() -> None:
    wanted = gradients(mimo(one_process_groups()))
    sizes = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float64}
    first, last = (
        mimo(
            replace(one_process_groups(), pp=torch.distributed.ProcessGroup(rank, 2)),
            encoder_groups=one_process_groups(),
            language=sizes,
            pre_process=rank == 0,
            post_process=rank == 1,
        )
        for rank in range(2)
    )
    assert not len(last.modality_submodules)
    hidden, _ = first(**batch())
    received = hidden.detach().requires_grad_()
    last.set_input_tensor([received])
    losses, mask = last(**(batch() | {"modality_inputs": None}))
    loss = (losses * mask).sum()
    loss.backward()
    hidden.backward(received.grad)
    found = named(first) | named(last) | {"loss": loss.detach()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **EXACT, msg=name)
