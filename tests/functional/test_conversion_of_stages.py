"""Conversion to format torch, whose files depend on the split of the layers into stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.megatron_formats.archive import MappedFile, load_archive
from megatron.training.conversion.convert import ConversionRequest, convert
from tests.support import selection
from tests.support.runs import losses, run_gpt
from tests.unit.dist_checkpointing.test_foreign import all_tensors
from tools.checkpoint import hybrid_conversion

_BASE = "--num-layers 4 --train-iters 1 --eval-iters 0 --save-interval 1 --lr-decay-iters 4"
_PP2 = "--pipeline-model-parallel-size 2"
_HYBRID = (
    "--model-kind mamba --hybrid-override-pattern M*-M --mamba-head-dim 8 --mamba-num-groups 2 "
    "--mamba-state-dim 8 --position-embedding-type none"
)
# Flags of a run, the number of its ranks, and the layers of each chunk of its stages.
RUNS = {
    "one stage": ("", 1, [[4]]),
    "four stages": ("--pipeline-model-parallel-size 4", 4, [[1]] * 4),
    "virtual stages": (f"{_PP2} --num-virtual-stages-per-pipeline-rank 2", 2, [[1, 1]] * 2),
    "layout": (f"{_PP2} --pipeline-model-parallel-layout Ettt|tL", 2, [[3], [1]]),
    "fewer on the first": (f"{_PP2} --decoder-first-pipeline-num-layers 1", 2, [[1], [3]]),
    "automatic": (f"{_PP2} --pipeline-split auto --vocab-size 1000", 2, [[3], [1]]),
    "hybrid": (_HYBRID, 1, [[4]]),
    "hybrid in two stages": (f"{_HYBRID} {_PP2}", 2, [[2]] * 2),
}
EVEN = {1: [[4]], 2: [[2]] * 2, 4: [[1]] * 4}


def layers_of_chunks(folder: Path) -> list[list[int]]:
    """Return how many layers each chunk has, for each rank's file."""
    counts = []
    for path in sorted(folder.glob("mp_rank_*")):
        content = load_archive(MappedFile(path / "model_optim_rng.pt"))
        chunks = [content[key] for key in sorted(content) if key.startswith("model")]
        names = [[name.split(".") for name in chunk] for chunk in chunks]
        counts.append([len({n[2] for n in chunk if n[1] == "layers"}) for chunk in names])
    return counts


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = all_tensors(folder)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        rows = values.shape[0] if values.dim() else None  # the others are vocabulary padding
        assert torch.equal(found[key][:rows], values), key


@pytest.mark.feature("Tools: convert.py writes format torch for any pipeline size, from any")
@pytest.mark.parametrize(
    ("name", "format"),
    selection.only(
        [
            *((name, "safetensors_dist") for name in ("layout", "automatic", "hybrid")),
            *((name, "torch") for name in ("virtual stages", "fewer on the first")),
        ],
        [
            *((name, "safetensors_dist") for name in RUNS),
            *((name, "torch") for name in ("virtual stages", "fewer on the first", "hybrid")),
        ],
    ),
)
def test_a_run_is_converted_to_any_number_of_stages(tmp_path: Path, name: str, format: str) -> None:
    flags, world_size, own = RUNS[name]
    source = tmp_path / "saved"
    save = ["--save", str(source), "--ckpt-format", format]
    run_gpt(tmp_path / "run", *_BASE.split(), *flags.split(), *save, world_size=world_size)
    expected = all_tensors(source / "iter_0000001")
    for pp, even in [*EVEN.items(), (None, own)]:
        args = {} if pp is None else {"pipeline_model_parallel_size": pp}
        said: list[str] = []
        target = tmp_path / str(pp)
        wanted = ConversionRequest(source=source, target=target, format="torch", args=args)
        folder = convert(wanted, said.append)
        is_other = pp not in (None, world_size)
        assert layers_of_chunks(folder) == (even if is_other else own)
        assert_same(folder, expected)
        splits = own not in EVEN.values()
        assert any("split evenly" in line for line in said) == (is_other and splits), said


def test_a_run_goes_on_from_what_was_converted_to_other_stages(tmp_path: Path) -> None:
    more = ["--train-iters", "2"]
    split = RUNS["virtual stages"][0].split()
    whole = losses(run_gpt(tmp_path / "whole", *_BASE.split(), *more))
    save = ["--save", str(tmp_path / "saved"), "--ckpt-format", "torch"]
    run_gpt(tmp_path / "run", *_BASE.split(), *split, *save, world_size=2)
    args = {"pipeline_model_parallel_size": 4}
    source = tmp_path / "saved"
    target = tmp_path / "four"
    convert(ConversionRequest(source=source, target=target, format="torch", args=args), [].append)
    same = ["--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--load", str(target)]
    same.append("--no-load-rng")
    again = run_gpt(tmp_path / "again", *_BASE.split(), *more, *same, world_size=4)
    assert losses(again) == pytest.approx(whole[1:], rel=1e-5)


def test_experts_are_converted_to_other_stages_and_expert_ranks(tmp_path: Path) -> None:
    source = tmp_path / "saved"
    flags = (
        "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall "
        "--expert-model-parallel-size 2 --use-distributed-optimizer --ckpt-format torch"
    )
    run_gpt(tmp_path / "run", *_BASE.split(), *flags.split(), "--save", str(source), world_size=2)
    expected = all_tensors(source / "iter_0000001")
    for pp, ep in ((2, 2), (4, 1), (1, 4)):
        target = tmp_path / f"{pp} {ep}"
        args = {"pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
        wanted = ConversionRequest(source=source, target=target, format="torch", args=args)
        assert_same(convert(wanted, [].append), expected)
        assert len(list((target / "iter_0000001").glob("mp_rank_*"))) == pp * ep


def test_layers_that_the_stages_do_not_divide_are_refused_with_one_message(tmp_path: Path) -> None:
    source = tmp_path / "saved"
    run_gpt(tmp_path / "run", *_BASE.split(), *_HYBRID.split(), "--save", str(source))
    flags = f"--load-dir {source} --save-dir {tmp_path / 'cut'} --target-pp-size 3"
    with pytest.raises(ConfigError) as raised:
        hybrid_conversion.main(flags.split())
    assert str(raised.value) == (
        "pipeline-parallel size 3: the 4 layers of the checkpoint cannot be split evenly over 3 "
        "stages: give a size that divides 4"
    )
    hybrid_conversion.main([*flags.split()[:-1], "2"])
    assert layers_of_chunks(tmp_path / "cut" / "iter_0000001") == EVEN[2]
