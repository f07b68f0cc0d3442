"""M-RoPE: positions with a time, a height and a width, compared with transformers' Qwen2-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.splicing import splice
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.training.arguments.parser import build_parser
from megatron.training.conversion import hf
from megatron.training.conversion.convert import run_config
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.shape import args_of, shape_of
from megatron.training.models.kind import language_arguments
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

LENGTH = 16
VOCABULARY = 64
SECTIONS = (1, 2, 1)  # of heads 8 wide
IMAGE_TOKEN = 60


def grid(batch: int = 2, length: int = LENGTH) -> Tensor:
    """Return positions [3, b, s] that go up and down."""
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 30, (3, batch, length), generator=generator)


def ids(batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, IMAGE_TOKEN, (batch, LENGTH), generator=generator)


def qwen(**changes: Any) -> Any:
    """Return transformers' Qwen2-VL with random weights."""
    transformers = pytest.importorskip("transformers")
    text = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
        **{"max_position_embeddings": 64, "rms_norm_eps": 1e-6},
        "rope_parameters": {"rope_type": "default", "mrope_section": list(SECTIONS)},
    }
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4}
    special = {"image_token_id": IMAGE_TOKEN, "video_token_id": 61, "vision_start_token_id": 62}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    torch.manual_seed(3)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def ours(model: Any) -> GPTModel:
    """Return our model of the language model of ``model``, built from flags."""
    prefix = "model.language_model."
    tensors = {
        name.replace(prefix, "model."): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith((prefix, "lm_head."))
    }
    made = hf.import_model(model.config.text_config.to_dict(), as_lazy(tensors))
    tokens = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY - 1}
    run = run_config(vars(build_parser().parse_args([])) | args_of(made.shape) | tokens)
    assert shape_of(run, VOCABULARY) == made.shape
    config = replace(run.model, bf16=False, params_dtype=torch.float32)
    sizes = {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
    given = language_arguments(run, **sizes, groups=one_process_groups())
    gpt = GPTModel(config, get_gpt_layer_local_spec(config=config), **given)
    gpt.load_state_dict({name: tensor.make() for name, tensor in made.tensors.items()})
    return gpt.eval()


@pytest.mark.feature("Model: M-RoPE (--position-embedding-type mrope) has transformers' logits")
@pytest.mark.parametrize("is_text", [True, False])
def test_logits_are_those_of_transformers(is_text: bool) -> None:
    model = qwen()
    positions = torch.arange(LENGTH).expand(2, -1) if is_text else grid()
    embedded = model.model.language_model.embed_tokens(ids())
    theirs = positions.expand(3, -1, -1)
    wanted = model.model.language_model(inputs_embeds=embedded, position_ids=theirs)[0]
    wanted = model.lm_head(wanted)
    found = ours(model)(ids(), positions, None)
    torch.testing.assert_close(found, wanted, **tolerances.LOGITS)


@pytest.mark.parametrize("interleaved", [False, True])
def test_text_is_rotated_as_by_rope(interleaved: bool) -> None:
    rope = RotaryEmbedding(8, 1.0, interleaved)
    made = MultimodalRotaryEmbedding(8, 1.0, interleaved)
    positions = torch.arange(LENGTH).expand(3, 2, -1)
    wanted = rope(LENGTH).expand(-1, 2, -1, -1)
    torch.testing.assert_close(made(positions, SECTIONS), wanted)


def test_angles_are_those_of_transformers() -> None:
    wanted_cos, wanted_sin = qwen().model.language_model.rotary_emb(torch.zeros(1), grid())
    made = MultimodalRotaryEmbedding(8, rotary_base=1000000)
    angles = made(grid(), SECTIONS).squeeze(2).transpose(0, 1)
    torch.testing.assert_close(angles.cos(), wanted_cos)
    torch.testing.assert_close(angles.sin(), wanted_sin)
    table = made.table_of_grid(grid(), SECTIONS, torch.float32)
    torch.testing.assert_close(table.cos.squeeze(2).transpose(0, 1), wanted_cos[..., :4])


def test_positions_of_images_are_those_of_transformers() -> None:
    # Rows: text, an image of 2 x 3 embeddings, text, one of 3 x 1; text and an image of 2 x 2.
    tokens = torch.tensor([[1, 2, -200, 3, -200, 4], [5, -200, 6, 7, 8, 9]])
    is_image = tokens == -200
    sizes = torch.zeros(2, 6, 3, dtype=torch.int64)
    sizes[is_image] = torch.tensor([[1, 2, 3], [1, 3, 1], [1, 2, 2]])
    where = splice(is_image, sizes.prod(-1))
    found = where.grid_positions(sizes)
    length = found.shape[-1]
    row = [1, 2, *[IMAGE_TOKEN] * 6, 3, *[IMAGE_TOKEN] * 3, 4]
    other = [5, *[IMAGE_TOKEN] * 4, 6, 7, 8, 9]
    for number, (tokens_of_row, grids) in enumerate(
        [(row, [[1, 4, 6], [1, 6, 2]]), (other, [[1, 4, 4]])]
    ):
        spread = torch.tensor([tokens_of_row])
        wanted, _ = qwen().model.get_rope_index(
            spread,
            mm_token_type_ids=(spread == IMAGE_TOKEN).int(),
            image_grid_thw=torch.tensor(grids),
        )
        assert found[:, number, : spread.shape[1]].tolist() == wanted[:, 0].tolist()
    assert length == 13


def gpt(groups: Any) -> GPTModel:
    config = tiny_config(
        params_dtype=torch.float64,
        init_seed=5,
        init_method_std=0.2,
        mrope_section=SECTIONS,
        context_parallel_size=groups.cp.size(),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(config=config),
        VOCABULARY,
        LENGTH,
        position_embedding_type="mrope",
        pg_collection=groups,
    )


def on_ranks(rank: int, world: int) -> Tensor:
    groups = create_process_groups(*make_grids(world, cp=world))
    held = held_tokens((LENGTH,), rank, world)
    losses = gpt(groups)(ids()[:, held], grid()[..., held], None, labels=ids()[:, held])
    rotary = MultimodalRotaryEmbedding(8, cp_group=groups.cp)
    complete = MultimodalRotaryEmbedding(8)(grid(), SECTIONS)
    assert torch.equal(rotary(grid(), SECTIONS), complete[held])
    return losses.detach()


@pytest.mark.feature("Model: M-RoPE on context-parallel ranks computes as one process")
def test_context_parallel_ranks_compute_what_one_does() -> None:
    wanted = gpt(one_process_groups())(ids(), grid(), None, labels=ids())
    for rank, found in enumerate(run_ranks(on_ranks, 2)):
        held = held_tokens((LENGTH,), rank, 2)
        torch.testing.assert_close(found, wanted[:, held], rtol=1e-9, atol=1e-9)


def test_sections_that_do_not_fit_a_head_are_refused() -> None:
    for sections, message in (
        (None, "--mrope-section is not given"),
        ((2, 2), "--mrope-section has 2 numbers"),
        ((4, 4, 4), "--mrope-section 4 4 4 are 12 pairs of channels and a head rotates 4"),
    ):
        config = tiny_config(mrope_section=sections)
        with pytest.raises(ConfigError, match=message):
            GPTModel(
                config,
                get_gpt_layer_local_spec(config=config),
                VOCABULARY,
                LENGTH,
                position_embedding_type="mrope",
                pg_collection=one_process_groups(),
            )
