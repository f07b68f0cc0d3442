"""The real command line with --mtp-num-layers: what is reported, and going on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.megatron_formats.archive import MappedFile
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpIndex
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.generation import GenerationLayout, open_writer
from tests.functional.test_pretrain_gpt import steps
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, run_gpt, run_gpt_in_virtual_ranks

ROPE = ["--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"]
AHEAD = [*ROPE, "--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.5"]
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout Ett|mmL --use-distributed-optimizer"
)


def test_each_depth_is_reported_in_training_and_the_loss_of_the_model_is_its_own(
    tmp_path: Path,
) -> None:
    short = ["--train-iters", "2", "--eval-interval", "2"]
    alone = run_gpt(tmp_path / "alone", *ROPE, *short)
    found = run_gpt(tmp_path / "found", *AHEAD, *short)
    assert losses(found)[0] == losses(alone)[0]
    assert losses(found)[1] != losses(alone)[1], "what predicts ahead trains the model too"
    in_training = [key for key in found[0] if key.endswith("loss")]
    assert in_training == ["lm loss", "mtp_1 loss", "mtp_2 loss"]
    assert not any("mtp" in key and "validation" in key for line in found for key in line)


@pytest.mark.parametrize("format_", selection.first(1, ["torch_dist", "safetensors_dist"]))
def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path, format_: str) -> None:
    base = [*TINY, *AHEAD]
    straight = steps(run_gpt(tmp_path / "straight", base=base))
    saved = ["--save", str(tmp_path / "ck"), "--save-interval", "2", "--exit-interval", "2"]
    flags = [*AHEAD, *saved, *LAYOUT.split(), "--ckpt-format", format_]
    run_gpt_in_virtual_ranks(tmp_path / "first", *flags)
    rest = steps(run_gpt(tmp_path / "rest", "--load", str(tmp_path / "ck"), base=base))
    assert len(rest) == 2
    for found, expected in zip(rest, straight[2:], strict=True):
        torch.testing.assert_close(found, expected, **tolerances.LAYOUT_LOSS)
    if format_ == "torch_dist":
        tensors = DcpIndex(tmp_path / "ck/iter_0000002", MappedFile).tensors
        for name in ("enorm", "eh_proj", "transformer_layer.mlp.linear_fc2", "final_layernorm"):
            assert f"mtp.layers.1.{name}.weight" in tensors
        state = "optimizer.state.exp_avg.mtp.layers.0.transformer_layer.mlp.linear_fc1"
        assert f"{state}.weight" in tensors


def written(rank: int, world_size: int, load: str, num_drafts: int) -> tuple[list[int], bool, int]:
    """Return tokens, whether a rank has MTP layers, and how many tokens were drafted."""
    options = EngineOptions()
    if num_drafts:
        options = EngineOptions(draft_model="mtp", num_draft_tokens=num_drafts)
    layout = GenerationLayout(pipeline=world_size)
    engine = open_writer(load, device_kind="cpu", layout=layout, options=options).engine
    has_layers = any(name.startswith("mtp.") for name, _ in engine.model.module.named_parameters())
    if rank:
        engine.follow()
        return [], has_layers, 0
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=20, ignore_eos=True)
    (found,) = engine.generate([engine.model.request("a", [3, 5, 8], params)]).values()
    engine.close()
    return [t.token for t in found], has_layers, engine.stats().num_drafts


@pytest.mark.parametrize("format_", selection.first(1, ["torch", "safetensors_dist", "torch_dist"]))
def test_the_layers_of_a_checkpoint_draft_tokens_if_asked(tmp_path: Path, format_: str) -> None:
    load = str(tmp_path / "ck")
    saved = ["--save", load, "--save-interval", "3", "--train-iters", "3"]
    run_gpt(tmp_path / "run", *AHEAD, *saved, "--ckpt-format", format_)
    ((tokens, has_layers, num_drafts),) = run_ranks(written, 1, load, 0)
    assert not has_layers, "the layers are left in the checkpoint"
    assert not num_drafts
    for world_size in (1, 2):
        found = run_ranks(written, world_size, load, 2)
        assert found[0][0] == tokens
        assert found[-1][1]
        assert found[0][2] > 0
