"""What is written in the reference's formats is what the reference wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.megatron_formats import foreign_reader
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    MappedFile,
    StoredArray,
    load_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpIndex
from megatron.training.conversion.convert import ConversionRequest, convert
from tests.functional.test_reference_run import FLAGS, GOLDEN, OURS, PP, TP
from tests.support import host_gpu, selection
from tests.support.ranks import run_ranks
from tests.support.reference_checkpoints import ITERATION, unpack
from tests.support.runs import TINY, refusal, run_gpt, train_gpt
from tests.unit.dist_checkpointing.test_foreign import all_tensors

FILES = [
    *("--data-path", str(GOLDEN / "data" / "text_text_document")),
    *("--tokenizer-model", str(GOLDEN / "data" / "spm.model")),
]


@pytest.fixture(autouse=True)
def bytes_of_device_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device has the generator of a CPU."""
    if host_gpu.is_asked():
        monkeypatch.setattr(foreign_reader, "_CUDA_STATE_BYTES", torch.get_rng_state().numel())


def converted(folder: Path, name: str, kind: str, *flags: str, world_size: int = 1) -> Path:
    """A checkpoint of the reference, loaded and written again in format ``kind``."""
    target = ["--ckpt-convert-format", kind, "--ckpt-convert-save", str(folder)]
    source = ["--load", str(folder / name)]
    run_ranks(train_gpt, world_size, [*FLAGS, *FILES, *OURS, *source, *target, *flags])
    return folder / kind / ITERATION


def described(folder: Path) -> dict[str, Any]:
    """Each tensor of a torch_dist folder: dtype, shape, offsets and shapes of chunks, values."""
    index = DcpIndex(folder, MappedFile)
    return {
        key: (
            tensor.dtype,
            tensor.shape,
            [(c.offset, c.shape, c.array().read().tolist()) for c in tensor.chunks],
        )
        for key, tensor in index.tensors.items()
    } | {key: type(index.load(key)).__name__ for key in index.objects}


def structure(value: Any) -> Any:
    """Nested keys, types and shapes; numbers and texts of the command line do not count."""
    if isinstance(value, StoredArray):
        return value.dtype, value.shape
    if isinstance(value, Mapping):
        return {key: structure(item) for key, item in value.items()}
    if type(value).__name__ == "Namespace":
        return "args"
    if isinstance(value, list | tuple):
        return type(value), [structure(item) for item in value[:20]]
    return type(value)


def same_values(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, StoredArray):
        return torch.equal(ours.read(), theirs.read())
    if isinstance(theirs, Mapping):
        return all(same_values(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return all(map(same_values, ours, theirs))
    return True


def loaded(path: Path) -> Any:
    return load_archive(MappedFile(path))


@pytest.mark.feature("Checkpoints: written for Megatron-LM as it writes them, torch_dist and torch")
def test_torch_dist_is_written_as_the_reference_wrote_it(tmp_path: Path) -> None:
    theirs = unpack(tmp_path, "gpt_torch_dist") / ITERATION
    ours = converted(tmp_path, "gpt_torch_dist", "torch_dist")
    assert described(ours) == described(theirs)
    assert (ours / "metadata.json").read_text() == (theirs / "metadata.json").read_text()
    mine, its = loaded(ours / "common.pt"), loaded(theirs / "common.pt")
    assert structure(mine) == structure(its)
    assert mine["optimizer"]["param_groups"] == its["optimizer"]["param_groups"]
    assert mine["opt_param_scheduler"] == its["opt_param_scheduler"]
    assert vars(mine["args"])["consumed_train_samples"] == 40
    lacking = vars(its["args"]).keys() - vars(mine["args"]).keys()
    assert not lacking, lacking


def test_a_file_per_rank_is_written_as_the_reference_wrote_it(tmp_path: Path) -> None:
    theirs = unpack(tmp_path, "gpt_torch") / ITERATION / "mp_rank_00"
    ours = converted(tmp_path, "gpt_torch", "torch") / "mp_rank_00"
    mine, its = loaded(ours / "model_optim_rng.pt"), loaded(theirs / "model_optim_rng.pt")
    assert structure(mine) == structure(its)
    assert list(mine["model"]) == list(its["model"])
    assert same_values(mine["model"], its["model"])
    assert same_values(mine["optimizer"]["state"], its["optimizer"]["state"])


def test_buffers_of_the_distributed_optimizer_are_written_as_the_reference_wrote_them(
    tmp_path: Path,
) -> None:
    name = "gpt_torch_tp2pp2_distopt"
    theirs = unpack(tmp_path, name) / ITERATION
    flags = [*TP.split(), *PP.split(), "--use-distributed-optimizer"]
    ours = converted(tmp_path, name, "torch", *flags, world_size=4)
    for path in sorted(theirs.rglob("*.pt")):
        mine, its = loaded(ours / path.relative_to(theirs)), loaded(path)
        assert structure(mine) == structure(its), path
        assert same_values(mine.get("model", mine), its.get("model", its)), path
        if "optimizer" in its:
            groups = [part["optimizer"]["optimizer"]["param_groups"] for part in (mine, its)]
            assert groups[0] == groups[1]


def test_torch_itself_loads_what_was_written_for_it(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    unpack(tmp_path, "gpt_torch_dist")
    ours = converted(
        tmp_path, "gpt_torch_dist", "torch_dist", "--use-distributed-optimizer", *TP.split(),
        world_size=4,
    )  # fmt: skip
    index = DcpIndex(ours, MappedFile)
    state = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in index.tensors.items()}
    dcp.load(state, checkpoint_id=ours, no_dist=True)
    whole = described(unpack(tmp_path / "b", "gpt_torch_dist") / ITERATION)
    for key, values in state.items():
        if key.startswith("optimizer.state.exp_avg.") and "linear" not in key:
            stored = [chunk[2] for chunk in whole[key][2]]
            assert values.flatten().tolist() == torch.tensor(stored).flatten().tolist(), key
    read, wanted = all_tensors(ours), all_tensors(tmp_path / "gpt_torch_dist" / ITERATION)
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[key], wanted[key]) for key in wanted)
    qkv = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    assert index.tensors[qkv].shape == (2, 2, 1, 48 * 32)
    assert index.tensors[qkv].unflattened == (2, 96, 32)


ROUND_TRIP = (
    "--train-iters 2 --eval-iters 0 --bf16 --swiglu --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --save-interval 2"
).split()


def random_states(folder: Path) -> list[Any]:
    with open_reader(folder) as reader:
        return [reader.rank_state(rank) for rank in range(4)]


@pytest.mark.parametrize("kind", selection.first(2, ["torch_dist", "torch_dcp", "torch"]))
def test_what_is_written_in_any_format_is_read_again_bit_for_bit(tmp_path: Path, kind: str) -> None:
    folders = [tmp_path / "own", tmp_path / kind]
    for folder, name in zip(folders, ("safetensors_dist", kind), strict=True):
        flags = ["--save", str(folder), "--ckpt-format", name]
        if kind == "torch_dist":
            flags.append("--use-distributed-optimizer")
        run_gpt(tmp_path / "run", *ROUND_TRIP, *flags, world_size=4)
    folders.append(tmp_path / "converted")
    convert(ConversionRequest(source=folders[0], target=folders[2], format=kind), [].append)
    folders = [folder / "iter_0000002" for folder in folders]
    own, *others = map(all_tensors, folders)
    for other in others:
        assert own.keys() == other.keys()
        for key, values in own.items():
            rows = values.shape[0] if values.dim() else None
            assert other[key].dtype == values.dtype
            assert torch.equal(other[key][:rows], values), key  # others store padding too
    mine, *theirs = map(random_states, folders)
    assert mine[0] != mine[1]
    assert theirs == [mine, mine]
    with open_reader(folders[1]) as reader:
        assert reader.common()["optimizer"]["step"] == 2.0
        assert reader.common()["counters"]["consumed_train_samples"] == 16
        assert reader.manifest.iteration == 2


EXPERTS = (
    "--train-iters 1 --eval-iters 0 --bf16 --swiglu --disable-bias-linear --num-experts 4 "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 16 --save-interval 1 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)
GROUPED = "--moe-grouped-gemm --use-distributed-optimizer"
LATENT = (
    "--moe-layer-freq [0]+[1] --multi-latent-attention --position-embedding-type rope "
    "--q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--qk-layernorm --normalization RMSNorm"
)


AHEAD = (
    "--mtp-num-layers 1 --pipeline-model-parallel-size 1 --softmax-type learnable "
    "--position-embedding-type rope"
)


@pytest.mark.feature("Checkpoints: experts and latent attention in torch_dist, torch and torch_dcp")
@pytest.mark.parametrize("more", selection.first(2, [GROUPED, LATENT, AHEAD]))
def test_experts_are_written_in_any_format_and_read_again(tmp_path: Path, more: str) -> None:
    own = tmp_path / "own"
    flags = [*EXPERTS.split(), *more.split()]
    run_gpt(tmp_path / "run", *flags, "--save", str(own), world_size=4)
    expected = all_tensors(own / "iter_0000001")
    assert expected["decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32
    dist = ["--save", str(tmp_path / "torch_dist"), "--ckpt-format", "torch_dist"]
    run_gpt(tmp_path / "run", *flags, *dist, world_size=4)
    for kind in ("torch", "torch_dcp"):
        convert(ConversionRequest(source=own, target=tmp_path / kind, format=kind), [].append)
    for kind in ("torch_dist", "torch", "torch_dcp"):
        found = all_tensors(tmp_path / kind / "iter_0000001")
        assert found.keys() == expected.keys(), kind
        for key, values in expected.items():
            rows = values.shape[0] if values.dim() else None
            assert torch.equal(found[key][:rows], values), (kind, key)
    mine, dcp = (random_states(f / "iter_0000001") for f in (own, tmp_path / "torch_dcp"))
    assert mine[0] is not None
    assert mine == dcp
    ranks = sorted(path.name for path in (tmp_path / "torch/iter_0000001").glob("mp_rank_*"))
    if more == AHEAD:
        assert ranks == ["mp_rank_00_000", "mp_rank_01_001"]
        return
    assert ranks == [f"mp_rank_{e:02d}_{p:03d}_{e:03d}" for e in range(2) for p in range(2)]
    names = loaded(tmp_path / "torch/iter_0000001" / ranks[3] / "model_optim_rng.pt")["model"]
    index = DcpIndex(tmp_path / "torch_dist/iter_0000001", MappedFile)
    is_mixed = "[0]" in more
    experts = "mlp.experts.experts.linear_fc1.weight"
    stack = f"decoder.layers.{'1.' if is_mixed else ''}{experts}"
    moments = index.tensors[f"optimizer.state.exp_avg.{stack}"]
    one = tuple(expected["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"].shape)
    if is_mixed:
        assert index.tensors[stack].shape == (4, *one)
        assert moments.shape == (4, *one)
        assert "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight" in (
            index.tensors
        )
    else:
        assert index.tensors[stack].shape == (2, 4, *one)
        assert moments.shape == (2, 4, 2, 1, one[0] * one[1] // 2)
        assert "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4" in (
            index.objects
        )
        assert "decoder.layers.0.mlp.experts.linear_fc1.weight1" in names


COMMON = (
    "--train-iters 1 --eval-iters 0 --bf16 --save-interval 1 --tensor-model-parallel-size 2 "
    "--use-distributed-optimizer"
)
KINDS = {
    "bert": ("--pipeline-model-parallel-size 2 --apply-residual-connection-post-layernorm"),
    "t5": (
        "--encoder-num-layers 2 --decoder-num-layers 3 --encoder-seq-length 32 "
        "--decoder-seq-length 16 --vocab-extra-ids 10"
    ),
    "mamba": (
        "--num-layers 6 --hybrid-override-pattern M*-MEM --mamba-head-dim 8 --mamba-num-groups 2 "
        "--mamba-state-dim 8 --position-embedding-type none --pipeline-model-parallel-size 2 "
        "--num-experts 4 --sequence-parallel --moe-token-dispatcher-type alltoall "
        "--disable-bias-linear --swiglu"
    ),
}


@pytest.mark.feature("Checkpoints: BERT, T5 and hybrids in torch_dist, torch and torch_dcp")
@pytest.mark.parametrize("model", selection.only(["t5"], KINDS))
def test_other_kinds_are_written_in_any_format_and_read_again(tmp_path: Path, model: str) -> None:
    own, flags = tmp_path / "own", ["--model-kind", model, *COMMON.split(), *KINDS[model].split()]
    run_gpt(tmp_path / "run", *flags, "--save", str(own), world_size=4)
    expected = all_tensors(own / "iter_0000001")
    dist = ["--save", str(tmp_path / "torch_dist"), "--ckpt-format", "torch_dist"]
    run_gpt(tmp_path / "run", *flags, *dist, world_size=4)
    formats = ["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"]
    for kind in formats[1:]:
        convert(ConversionRequest(source=own, target=tmp_path / kind, format=kind), [].append)
    for kind in formats:
        found = all_tensors(tmp_path / kind / "iter_0000001")
        assert found.keys() == expected.keys(), kind
        for key, values in expected.items():
            rows = values.shape[0] if values.dim() else None
            assert torch.equal(found[key][:rows], values), (kind, key)
    index = DcpIndex(tmp_path / "torch_dist/iter_0000001", MappedFile)
    names = {key for key in index.tensors if not key.startswith("optimizer.")}
    assert REFERENCE_NAMES[model] <= names


# Some names that Megatron-LM gives: stacked where layers are alike, a mixer in blocks.
REFERENCE_NAMES = {
    "bert": {
        "encoder.layers.mlp.linear_fc1.layer_norm_weight",
        "embedding.tokentype_embeddings.weight",
        "encoder.final_layernorm.bias",
        "lm_head.dense.weight",
        "output_layer.bias",
        "binary_head.weight",
        "pooler.dense.bias",
    },
    "t5": {
        "encoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.pre_cross_attn_layernorm.weight",
        "decoder.layers.cross_attention.linear_kv.weight",
        "lm_head.output_layer.bias",
    },
    "mamba": {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        *(f"decoder.layers.3.mixer.in_proj.weight.{block}" for block in ("z", "x", "B", "C", "dt")),
        "decoder.layers.3.mixer.conv1d.bias.B",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.4.pre_mlp_layernorm.weight",
        "decoder.final_norm.weight",
    },
}


def test_saved_arguments_hold_no_addresses_of_a_process(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--ckpt-format", "torch_dist"]
    run_ranks(train_gpt, 1, [*TINY, "--swiglu", "--train-iters", "1", *save])
    stored = (tmp_path / "iter_0000001" / "common.pt").read_bytes()
    assert b"swiglu" in stored
    assert b" at 0x" not in stored


@pytest.mark.feature("Checkpoints: another model's, or a damaged one, is refused by one sentence")
def test_what_does_not_fit_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    folder = unpack(tmp_path, "gpt_torch_dist")
    base = [*FLAGS, *FILES, *OURS, "--load", str(folder)]

    def said(*flags: str) -> str:
        (sentence,) = run_ranks(refusal, 1, [*base, *flags])
        assert "Traceback" not in sentence
        return sentence

    wider = said("--hidden-size", "64")
    assert "linear_fc2.weight has shape [32, 128] in the checkpoint and [64, 256] in" in wider
    assert "this run needs" in said("--num-layers", "3")
    data = folder / ITERATION / "__0_1.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-700])
    assert "__0_1.distcp has" in said()
    middle = len(whole) // 3
    data.write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
    assert "__0_1.distcp is damaged" in said()


# Flags of the runs that resume one after another; each saves one more step.
CHAINS = {
    "kept": [
        "--tensor-model-parallel-size 2",
        "--use-checkpoint-args",
        "",
        "--tensor-model-parallel-size 2",
    ],
    "other multiple": [
        "--make-vocab-size-divisible-by 512",
        "--use-checkpoint-args",
        "--make-vocab-size-divisible-by 3 --tensor-model-parallel-size 2",
    ],
    "given": ["--padded-vocab-size 640 --pad-vocab-in-loss", ""],
}


@pytest.mark.parametrize(
    ("kind", "chain"),
    [*(("torch_dist", chain) for chain in CHAINS), *((k, "kept") for k in ("torch", "torch_dcp"))],
)
def test_runs_resume_each_other_with_other_vocabulary_padding(
    tmp_path: Path, kind: str, chain: str
) -> None:
    folder = tmp_path / "saved"
    save = ["--save", str(folder), "--load", str(folder), "--ckpt-format", kind]
    for step, flags in enumerate(CHAINS[chain], start=1):
        more = [*flags.split(), *save, "--train-iters", str(step), "--eval-iters", "0"]
        more += ["--lr-decay-iters", "9"]
        world_size = 2 if "tensor" in flags else 1
        lines = run_gpt(tmp_path / str(step), *more, world_size=world_size)
        assert len([line for line in lines if "lm loss" in line]) == 1
