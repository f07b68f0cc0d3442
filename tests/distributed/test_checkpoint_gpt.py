"""A trained GPT with its optimizer, loaded in another layout and saved again, is the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.megatron_formats.archive import MappedFile
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpIndex
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.callbacks.periodic import save
from tests.distributed.test_fsdp import INSTANCES, SHARD
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, run_gpt
from tests.support.training_run import training_run

MODELS = {
    "gpt": ["--vocab-size", "101", "--make-vocab-size-divisible-by", "8"],
    "llama": (
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --bf16"
    ).split(),
}
ZERO = "--use-distributed-optimizer"
LAYOUTS = [  # ranks, tensor parallel and other flags; one loaded from the other
    (2, "2"),
    (4, f"2 {ZERO} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"),
    (2, "1 --pipeline-model-parallel-size 2"),
    (4, f"1 {ZERO} {INSTANCES}"),
    (4, f"1 --pipeline-model-parallel-size 2 {ZERO}"),
    (4, "2 --ckpt-fully-parallel-load"),
    (4, f"1 {ZERO} --ckpt-fully-parallel-load"),
    (2, f"1 {SHARD} optim_grads_params --init-model-with-meta-device"),
    (4, f"1 {SHARD} optim_grads {INSTANCES} --enable-full-sharding-in-hsdp"),
    (4, "2 --use-torch-fsdp2"),
    (4, "1 --use-torch-fsdp2 --pipeline-model-parallel-size 2"),
    (1, "1"),
]


def load_and_save(rank: int, world_size: int, argv: Sequence[str]) -> None:
    """Set a run up, load, and save what was loaded."""
    run = training_run(argv)
    run.load()
    save(run)


def content(root: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(root / "iter_0000003") as reader:
        assert reader.common()["counters"]["consumed_train_samples"] == 24
        return {key: reader.read(key) for key in reader.tensors}


@pytest.mark.feature(
    "Checkpoints: any layout of tensors, stages and replicas loads any other, optimizer included"
)
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("llama", LAYOUTS[::2]),
        *(pytest.param(model, LAYOUTS, marks=pytest.mark.slow) for model in MODELS),
    ],
    ids=["llama", "gpt, all layouts", "llama, all layouts"],
)
def test_resharding_is_the_identity(tmp_path, model, layouts):
    flags = [*MODELS[model], "--train-iters", "3", "--save-interval", "100"]
    last = tmp_path / "trained"
    run_gpt(tmp_path, *flags, "--save", str(last))
    expected = content(last)
    kinds = {key.split(".")[2] for key in expected if key.startswith("optimizer.state")}
    assert kinds >= {"exp_avg", "exp_avg_sq"}
    for i, (world_size, tp) in enumerate(layouts):
        root = tmp_path / str(i)
        directories = ["--load", str(last), "--save", str(root)]
        parallel = ["--tensor-model-parallel-size", *tp.split()]
        run_ranks(load_and_save, world_size, [*TINY, *flags, *directories, *parallel])
        found = content(root)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype, key
            assert torch.equal(found[key], tensor), (key, layouts[i])
        last = root


@pytest.mark.feature("Checkpoints: fsdp_dtensor, state by name of parameter, written and read")
def test_sharded_runs_write_a_format_that_others_read(tmp_path):
    flags = [*MODELS["llama"], "--train-iters", "3", "--save-interval", "100"]
    first, sharded, back = (tmp_path / name for name in ("first", "sharded", "back"))
    run_gpt(tmp_path, *flags, "--save", str(first))
    expected = content(first)
    shard = [*SHARD.split(), "optim_grads_params", "--ckpt-format", "fsdp_dtensor"]
    there = ["--load", str(first), "--save", str(sharded), *shard]
    run_ranks(load_and_save, 2, [*TINY, *flags, *there])
    index = DcpIndex(sharded / "iter_0000003", MappedFile)
    layer = "module.module.module.decoder.layers.0."
    halves = {f"optimizer.state.{layer}mlp.linear_fc1.weight{x}.exp_avg" for x in ("_w", "_v")}
    assert halves <= index.tensors.keys()
    assert "model.module.embedding.word_embeddings.weight" in index.tensors
    parallel = ["--tensor-model-parallel-size", "2"]
    run_ranks(
        load_and_save, 2, [*TINY, *flags, "--load", str(sharded), "--save", str(back), *parallel]
    )
    found = content(back)
    assert found.keys() == expected.keys()
    assert [k for k, v in expected.items() if not torch.equal(found[k], v)] == []
