"""What comes from Hugging Face trains in any layout, and what was trained there goes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.convert import HF, ConversionRequest, convert
from tests.support import tolerances
from tests.support.runs import TINY, losses, run_gpt

models = pytest.importorskip("tests.support.hugging_face_models", reason="needs transformers")

# Nothing about the model: that is in the checkpoint.
TRAINING = (
    "--device cpu --use-checkpoint-args --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 1e-3 --train-iters 2 --mock-data --log-interval 1 --eval-interval 1000 --eval-iters 1 "
    "--num-workers 0 --no-create-attention-mask-in-dataloader"
).split()
CUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split()

# Training that changes nothing, so that weights can be compared behind it.
STILL = (
    "--lr 0 --min-lr 0 --weight-decay 0 --moe-router-bias-update-rate 0 "
    "--moe-token-dispatcher-type alltoall"
).split()


@pytest.mark.feature(
    "Checkpoints: a Hugging Face model trains with --load and --use-checkpoint-args in any layout"
)
@pytest.mark.parametrize("case", ["gemma2", "gpt2"])
def test_a_converted_model_trains_in_any_layout_and_goes_back(case: str, tmp_path: Path) -> None:
    theirs, ours, cut = tmp_path / "theirs", tmp_path / "ours", tmp_path / "cut"
    changes = {"n_layer": 2} if case == "gpt2" else {"num_hidden_layers": 2}
    models.write(theirs, case, **changes)
    convert(ConversionRequest(source=theirs, target=ours, format="safetensors_dist", verify=False))
    load = [*TRAINING, "--load", str(ours)]
    alone = run_gpt(tmp_path / "one", base=load)
    layout = run_gpt(tmp_path / "four", *CUT, "--save", str(cut), base=load, world_size=4)
    torch.testing.assert_close(
        torch.tensor(losses(layout)), torch.tensor(losses(alone)), **tolerances.LAYOUT_LOSS
    )
    said: list[str] = []
    convert(ConversionRequest(source=cut, target=tmp_path / "back", format=HF), said.append)
    assert "agree within" in said[0]
    assert models.logits_of(tmp_path / "back", models.prompts())[1] == ""
    trained, before = models.weights(tmp_path / "back"), models.weights(theirs)
    assert trained.keys() == before.keys()
    assert not any(torch.equal(trained[name], before[name]) for name in before)


KINDS = {  # another depth; flags of any run, and of four processes
    "bert": ({"num_hidden_layers": 2}, "", "--pipeline-model-parallel-size 2"),
    "t5": (
        {},
        "--decoder-seq-length 16",
        "--pipeline-model-parallel-size 2 --encoder-pipeline-model-parallel-size 1",
    ),
    "nemotron-h": ({"hybrid_override_pattern": "M*M-"}, "", "--pipeline-model-parallel-size 2"),
}


@pytest.mark.parametrize("case", KINDS)
def test_other_kinds_train_in_any_layout_and_go_back(case: str, tmp_path: Path) -> None:
    theirs, ours, cut, back = (tmp_path / name for name in ("theirs", "ours", "cut", "back"))
    changes, *flags = KINDS[case]
    models.write(theirs, case, **changes)
    convert(ConversionRequest(source=theirs, target=ours, format="safetensors_dist", verify=False))
    kind = "mamba" if case == "nemotron-h" else case
    every, layout = (words.split() for words in flags)
    load = [*TRAINING, "--model-kind", kind, *every, "--load", str(ours)]
    alone = run_gpt(tmp_path / "one", base=load)
    several = ["--tensor-model-parallel-size", "2", *layout, "--save", str(cut)]
    together = run_gpt(tmp_path / "four", *several, base=load, world_size=4)
    torch.testing.assert_close(
        torch.tensor(losses(together)), torch.tensor(losses(alone)), **tolerances.LAYOUT_LOSS
    )
    said: list[str] = []
    convert(ConversionRequest(source=cut, target=back, format=HF), said.append)
    assert "agree within" in said[0]
    trained, before = models.weights(back), models.weights(theirs)
    assert trained.keys() == before.keys()
    assert not any(torch.equal(trained[name], before[name]) for name in before)


@pytest.mark.feature(
    "Checkpoints: experts and latent attention of Hugging Face models in any TP, PP and EP, "
    "and back bit for bit"
)
@pytest.mark.parametrize("case", ["qwen2 moe", "deepseek v3", "gpt-oss"])
def test_experts_go_through_a_layout_bit_for_bit(case: str, tmp_path: Path) -> None:
    theirs, ours, cut = tmp_path / "theirs", tmp_path / "ours", tmp_path / "cut"
    models.write(theirs, case, num_hidden_layers=2)
    convert(ConversionRequest(source=theirs, target=ours, format="safetensors_dist", verify=False))
    load = [*TRAINING, "--load", str(ours), *STILL]
    alone = run_gpt(tmp_path / "one", base=load)
    save = ["--save", str(cut), "--expert-model-parallel-size", "2"]
    layout = [*CUT, "--expert-tensor-parallel-size", "1", *save]
    found = run_gpt(tmp_path / "four", *layout, base=load, world_size=4)
    torch.testing.assert_close(
        torch.tensor(losses(found)), torch.tensor(losses(alone)), **tolerances.LAYOUT_LOSS
    )
    said: list[str] = []
    convert(ConversionRequest(source=cut, target=tmp_path / "back", format=HF), said.append)
    assert "agree within" in said[0]
    models.assert_same_weights(tmp_path / "back", theirs)
    assert models.logits_of(tmp_path / "back", models.prompts())[1] == ""


def test_a_run_of_muon_goes_through_formats_that_have_room_for_it(tmp_path: Path) -> None:
    """Both kinds of state pass, in another layout too; other formats refuse them."""
    saved, cut = tmp_path / "saved", "--tensor-model-parallel-size 2".split()
    base = [*TINY, *"--optimizer muon --override-opt_param-scheduler --eval-iters 0".split()]
    base += ["--vocab-size", "127"]  # with the token that ends a document: nothing to pad
    run_gpt(tmp_path, *f"--train-iters 2 --save {saved} --save-interval 2".split(), base=base)
    found = []
    for source in (saved, tmp_path / "torch_dist", tmp_path / "safetensors_dist"):
        if source is not saved:
            wanted = ConversionRequest(
                source=saved, target=source, format=source.name, verify=False
            )
            convert(wanted)
            saved = source
        flags = [*cut, "--train-iters", "4", "--load", str(source)]
        found.append(losses(run_gpt(tmp_path / "on", *flags, base=base, world_size=2))[-2:])
    assert found[1:] == found[:1] * 2
    for form in ("torch", "torch_dcp"):
        with pytest.raises(CheckpointError, match="no room for state of some parameters alone"):
            convert(
                ConversionRequest(source=saved, target=tmp_path / form, format=form, verify=False)
            )
