"""Checkpoints of adapters: small, resumed in any layout, refused with another base."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.peft.lora import is_of_adapter
from megatron.training.checkpointing.paths import resolve_folder
from megatron.training.conversion.convert import PEFT, ConversionRequest, convert
from tests.support import selection, tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, refusal, run_gpt

LORA = ("--lora-rank", "4", "--lora-target-modules", "all-linear", "word_embeddings")
STEPS = 6
TP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP = ("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trained model."""
    root = tmp_path_factory.mktemp("base")
    run_gpt(root / "log", "--save", str(root / "model"), "--train-iters", "1", "--lr", "0.05")
    return root / "model"


def refused(*flags: str) -> str:
    """Return the error message of a run that cannot start."""
    (said,) = run_ranks(refusal, 1, [*TINY, *flags])
    return said


def losses(run: list[dict[str, Any]]) -> list[float]:
    return [line["lm loss"] for line in run if "lm loss" in line]


@pytest.mark.feature("LoRA: checkpoints hold adapters alone and resume in any layout")
@pytest.mark.parametrize("format", selection.first(1, ["safetensors_dist", "torch_dist"]))
def test_adapters_resume_in_any_layout(base: Path, tmp_path: Path, format: str) -> None:
    save = ("--ckpt-format", format, "--save", str(tmp_path / "adapters"))
    flags = (*LORA, "--lr-decay-iters", str(STEPS), "--lr", "0.05")
    first = ("--load", str(base), "--train-iters", "2")
    whole = losses(
        run_gpt(tmp_path / "whole", "--load", str(base), *flags, "--train-iters", str(STEPS))
    )
    assert whole[-1] < whole[0] - 0.01
    found = losses(run_gpt(tmp_path / "a", *flags, *save, *first, *TP, world_size=2))
    again = ("--load", str(tmp_path / "adapters"), *save, *flags[len(LORA) :])
    found += losses(run_gpt(tmp_path / "b", *again, *LORA, "--train-iters", "4", *PP, world_size=2))
    restored = (*again, "--use-checkpoint-args")  # the flags of the adapters too
    found += losses(run_gpt(tmp_path / "c", *restored, "--train-iters", str(STEPS)))
    assert found == pytest.approx(whole, **{"rel": tolerances.LAYOUT_LOSS["rtol"]})
    with open_reader(resolve_folder(tmp_path / "adapters")) as reader:
        names = [name for name in reader.tensors if not name.startswith("optimizer.")]
        assert names
        assert all(map(is_of_adapter, names))
        assert any(name.startswith("optimizer.") for name in reader.tensors)


MODELS = {
    "experts": "--num-experts 4 --moe-router-topk 2 --swiglu --moe-ffn-hidden-size 16 "
    "--untie-embeddings-and-output-weights --lora-modules-to-save lm_head input_layernorm",
    "latent": "--multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope",
    "hybrid": "--model-kind mamba --hybrid-override-pattern M* --mamba-num-groups 2 "
    "--mamba-state-dim 4 --mamba-head-dim 8 --position-embedding-type none "
    "--lora-use-dora",
}


@pytest.mark.parametrize("model", selection.only(["experts", "hybrid"], MODELS))
def test_adapters_of_other_layers_resume_in_torch_dist(model: str, tmp_path: Path) -> None:
    ahead = ("--lr-decay-iters", "3", "--lr", "0.05")
    flags = (*MODELS[model].split(), *LORA[:2], *ahead, "--ckpt-format", "torch_dist")
    whole = losses(run_gpt(tmp_path / "whole", *flags, "--train-iters", "3"))
    save = ("--save", str(tmp_path / "adapters"))
    found = losses(run_gpt(tmp_path / "a", *flags, *save, "--train-iters", "2", *TP, world_size=2))
    again = ("--load", str(tmp_path / "adapters"), "--train-iters", "3")
    found += losses(run_gpt(tmp_path / "b", *flags, *again))
    assert found == pytest.approx(whole, rel=tolerances.LAYOUT_LOSS["rtol"])


@pytest.mark.feature("LoRA: adapters of another base are refused with one message")
def test_adapters_of_another_base_are_refused(base: Path, tmp_path: Path) -> None:
    adapters = str(tmp_path / "adapters")
    other = str(tmp_path / "other")
    start = ("--load", str(base), "--save", adapters, "--train-iters", "1")
    run_gpt(tmp_path / "a", *start, *LORA)
    run_gpt(tmp_path / "b", "--save", other, "--train-iters", "1", "--seed", "5")
    again = ("--load", adapters, "--train-iters", "1")
    said = refused(*again, *LORA, "--pretrained-checkpoint", other)
    assert re.search("adapters of another base: of .*model.* has [0-9a-f]", said), said
    said = refused(*again)
    assert re.search("holds adapters alone, and this run has none", said), said
    said = refused(*again, *LORA, "--lora-rank", "2")
    assert re.search("lora_rank: 4 in the checkpoint, 2 in this run", said), said
    said = refused("--load", str(base), "--save", str(base), *LORA)
    assert re.search("holds the base of the adapters: save them in anoth", said), said
    (base / "iter_0000001").rename(tmp_path / "moved")
    said = refused(*again, *LORA)
    assert re.search("their base .* is not there: give its directory", said), said
    run_gpt(tmp_path / "h", *again, *LORA, "--pretrained-checkpoint", str(tmp_path / "moved"))
    (tmp_path / "moved").rename(base / "iter_0000001")


def test_adapters_of_random_weights_need_their_seed(tmp_path: Path) -> None:
    adapters = str(tmp_path / "adapters")
    run_gpt(tmp_path / "a", "--save", adapters, "--train-iters", "1", *LORA)
    again = ("--load", adapters, "--train-iters", "1", *LORA)
    run_gpt(tmp_path / "b", *again, *TP, world_size=2)
    said = refused(*again, "--seed", "5")
    assert re.search("of random weights with hash", said), said


@pytest.mark.feature("LoRA: adapters go to PEFT's files and back, and are merged into their base")
def test_adapters_go_to_peft_and_back(tmp_path: Path) -> None:
    llama = (
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
    ).split()
    base = tmp_path / "base"
    adapters = tmp_path / "adapters"
    back = tmp_path / "back"
    run_gpt(tmp_path / "a", *llama, "--save", str(base), "--train-iters", "1")
    flags = (*LORA, "output_layer", "--lora-alpha", "8", "--lr", "0.05")
    flags += ("--lora-modules-to-save", "norm", "input_layernorm")
    start = ("--load", str(base), "--save", str(adapters), "--train-iters", "2")
    run_gpt(tmp_path / "b", *flags, *start, "--use-checkpoint-args")
    assert "output_layer.lora.a" in dict(_adapters_in(adapters))
    files = tmp_path / "peft"
    convert(ConversionRequest(source=adapters, target=files, format=PEFT))
    convert(ConversionRequest(source=files, target=back, format="safetensors_dist", base=base))
    for one, other in zip(_adapters_in(adapters), _adapters_in(back), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    merged = tmp_path / "merged"
    convert(ConversionRequest(source=adapters, target=merged, format="torch_dist"))
    restored = ("--use-checkpoint-args", "--finetune", "--train-iters", "1", "--lr", "0.01")
    loss = [
        losses(run_gpt(tmp_path / name, "--load", str(folder), *restored, *layout, world_size=n))
        for name, folder, layout, n in (
            ("c", adapters, (), 1),
            ("d", back, TP, 2),
            ("e", merged, PP, 2),
        )
    ]
    assert loss[1] == pytest.approx(loss[0], rel=tolerances.LAYOUT_LOSS["rtol"])
    assert loss[2] == pytest.approx(loss[0], rel=tolerances.LAYOUT_LOSS["rtol"])


def _adapters_in(directory: Path) -> list[tuple[str, torch.Tensor]]:
    with open_reader(resolve_folder(directory)) as reader:
        names = sorted(filter(is_of_adapter, reader.tensors))
        return [(n, reader.read(n)) for n in names if not n.startswith("optimizer.")]
