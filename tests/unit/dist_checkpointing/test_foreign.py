"""What Megatron-LM wrote, read under our keys: real checkpoints, and ones made up here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.megatron_formats.dcp_writer import (
    DcpFile,
    new_file,
    write_metadata,
)
from megatron.core.dist_checkpointing.megatron_formats.reference_values import reference_rng
from megatron.core.dist_checkpointing.records import Piece, TensorRecord
from megatron.training.checkpointing.checkpoint_tensors import rng_state
from tests.support.reference_checkpoints import ITERATION, unpack

LAYER = "decoder.layers.0"


def all_tensors(folder: Path) -> dict[str, Tensor]:
    with open_reader(folder) as reader:
        return {key: reader.read(key) for key in reader.tensors}


def ranks(folder: Path, files: Mapping[str, Any], **args: Any) -> Path:
    """A folder of format torch: ``files`` maps a rank's folder to its content."""
    for name, content in files.items():
        (folder / name).mkdir(parents=True)
        common = {"args": argparse.Namespace(**args), "iteration": 7, "checkpoint_version": 3.0}
        torch.save(common | content, folder / name / "model_optim_rng.pt")
    return folder


def test_both_formats_of_one_run_hold_the_same(tmp_path: Path) -> None:
    one = all_tensors(unpack(tmp_path, "gpt_torch") / ITERATION)
    other = all_tensors(unpack(tmp_path, "gpt_torch_dist") / ITERATION)
    assert len(one) == 84
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_random_states_are_those_of_the_rank(tmp_path: Path) -> None:
    with open_reader(unpack(tmp_path, "gpt_torch_tp2pp2_distopt") / ITERATION) as reader:
        states = [reader.rank_state(rank) for rank in range(4)]
        words = [state["rng_state"]["np_rng_state"][1][0] for state in states if state]
        assert words == [1234, 1234, 1334, 1334]  # stages are seeded apart
        assert dict(reader.manifest.layout["dense"])["pp"] == 2


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_old_orders_of_query_key_value_and_old_names_are_read(
    tmp_path: Path, version: float
) -> None:
    heads, width, hidden = 4, 2, 5
    ours = torch.arange(3.0 * heads * width * hidden).view(heads, 3, width, hidden)
    shares = ours.chunk(2)  # heads are cut over two ranks
    stored = [
        {0: s.transpose(0, 1), 1.0: s.transpose(1, 2), 2.0: s, 3.0: s}[version] for s in shares
    ]
    files = {
        f"mp_rank_{rank:02d}": {
            "checkpoint_version": version,
            "model": {
                "language_model": {
                    "embedding": {"word_embeddings": {"weight": torch.full((3, 5), float(rank))}},
                    "encoder": {
                        "layers.0.attention.query_key_value.weight": share.reshape(-1, hidden),
                        "layers.0.attention.query_key_value.bias": share.reshape(-1, hidden)[:, 0],
                        "layers.0.post_attention_layernorm.weight": torch.ones(5),
                    },
                }
            },
        }
        for rank, share in enumerate(stored)
    }
    folder = ranks(tmp_path, files, num_attention_heads=heads, tensor_model_parallel_size=2)
    found = all_tensors(folder)
    qkv = found[f"{LAYER}.self_attention.linear_qkv.weight"]
    assert torch.equal(qkv, ours.reshape(-1, hidden))
    assert torch.equal(found[f"{LAYER}.self_attention.linear_qkv.bias"], qkv[:, 0])
    assert torch.equal(found[f"{LAYER}.pre_mlp_layernorm.weight"], torch.ones(5))
    assert found["embedding.word_embeddings.weight"][:, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_gated_halves_virtual_stages_and_half_precision_state(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, two stages of two chunks with a layer each."""
    whole = {
        layer: torch.arange(8.0 * 3).view(8, 3).add(100 * layer).bfloat16() for layer in range(4)
    }
    files: dict[str, Any] = {}
    for tp in range(2):
        for pp in range(2):
            content: dict[str, Any] = {}
            mains = []
            for chunk in range(2):
                layer = whole[chunk * 2 + pp]
                share = torch.cat([half.chunk(2)[tp] for half in layer.chunk(2)])
                content[f"model{chunk}"] = {f"{LAYER}.mlp.linear_fc1.weight": share}
                mains.append(share.float() + 0.001)
            content["optimizer"] = {
                "optimizer": {
                    "state": {i: {"exp_avg": main * 2, "step": 3} for i, main in enumerate(mains)},
                    "param_groups": [{"wd_mult": 1.0, "params": [0, 1]}],
                },
                "grad_scaler": {"scale": torch.tensor([8.0]), "growth_tracker": 1},
                "fp32_from_fp16_params": [mains],
            }
            files[f"mp_rank_{tp:02d}_{pp:03d}"] = content
    folder = ranks(
        tmp_path, files, swiglu=True, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )
    found = all_tensors(folder)
    for layer in range(4):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        assert torch.equal(found[name], whole[layer])
        main = whole[layer].float() + 0.001
        assert torch.equal(found[f"optimizer.state.fp32_param.{name}"], main)
        assert torch.equal(found[f"optimizer.state.exp_avg.{name}"], main * 2)
    with open_reader(folder) as reader:
        scalars = reader.common()["optimizer"]
    assert scalars.pop("param_groups") == [{"wd_mult": 1.0}]
    assert scalars == {"step": 3.0, "grad_scaler": {"scale": 8.0, "growth_tracker": 1}}


def test_experts_in_one_matrix_of_each_rank_are_read(tmp_path: Path) -> None:
    """Two tensor-parallel ranks times two of experts, each with two experts and its optimizer."""
    first, second = torch.randn(4, 6, 5), torch.randn(4, 5, 6)  # inputs last, as ours
    files: dict[str, Any] = {}
    for tp in range(2):
        for ep in range(2):
            mine = slice(2 * ep, 2 * ep + 2)
            model = {
                "mlp.router.weight": torch.ones(4, 5),
                "mlp.experts.weight1": stacked(first[mine].chunk(2, 1)[tp], 1),
                "mlp.experts.weight2": stacked(second[mine].chunk(2, 2)[tp], 0),
            }
            model = {f"{LAYER}.{name}": value for name, value in model.items()}
            experts = list(model.values())[1:]
            states = [{0: {"exp_avg": torch.full((4, 5), 3.0)}}]
            states.append({i: {"exp_avg": value * 2} for i, value in enumerate(experts)})
            optimizer = [
                {"state": state, "param_groups": [{"wd_mult": 1.0, "params": list(state)}]}
                for state in states
            ]
            files[f"mp_rank_{tp:02d}_{ep:03d}"] = {"model": model, "optimizer": optimizer}
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "num_experts": 4}
    found = all_tensors(ranks(tmp_path, files, **sizes))
    assert found["optimizer.state.exp_avg.decoder.layers.0.mlp.router.weight"][0, 0] == 3
    for number in range(4):
        for kind, whole in (("linear_fc1", first), ("linear_fc2", second)):
            name = f"{LAYER}.mlp.experts.local_experts.{number}.{kind}.weight"
            assert torch.equal(found[name], whole[number])
            assert torch.equal(found[f"optimizer.state.exp_avg.{name}"], whole[number] * 2)


@pytest.mark.parametrize("is_single", [False, True])
def test_experts_of_torch_dist_are_read_stacked_or_by_number(
    tmp_path: Path, is_single: bool
) -> None:
    """Two layers of three experts; a tensor for all, or one for the halves of each expert."""
    whole = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    stored = {"decoder.layers.mlp.experts.experts.linear_fc1.weight": whole}
    if is_single:
        stored = {
            f"decoder.layers.mlp.experts.experts.{n}.linear_fc1.weight{half}": rows
            for n in range(3)
            for half, rows in zip(("_w", "_v"), whole[:, n].chunk(2, 1), strict=True)
        }
    tensors: dict[str, Any] = {}
    with new_file(tmp_path, 0, 0, {}) as file:
        for key, values in stored.items():
            shape = list(values.shape)
            pieces = [
                file.add_box([i, *[0] * (len(shape) - 1)], layer)
                for i, layer in enumerate(values.split(1))
            ]
            tensors[key] = {"shape": shape, "dtype": "float32", "pieces": pieces}
    write_metadata(tmp_path, tensors, {}, unflattened={})
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    common = {"args": argparse.Namespace(swiglu=True, num_experts=3), "iteration": 5}
    torch.save(common, tmp_path / "common.pt")
    found = all_tensors(tmp_path)
    assert len(found) == 6
    for layer in range(2):
        for number in range(3):
            name = f"mlp.experts.local_experts.{number}.linear_fc1.weight"
            assert torch.equal(found[f"decoder.layers.{layer}.{name}"], whole[layer, number])


def stacked(experts: Tensor, dim: int) -> Tensor:
    """[E, o, i] as [i, E * o] (``dim`` 1) or [E * i, o], an expert after the other."""
    there = experts.transpose(1, 2).contiguous()
    return there.view(there.shape[1], -1) if dim == 1 else there.view(-1, there.shape[2])


def test_padding_of_the_vocabulary_is_left_out_and_another_vocabulary_is_not(
    tmp_path: Path,
) -> None:
    name = "embedding.word_embeddings.weight"
    stored = torch.arange(128.0 * 2).view(128, 2)
    folder = ranks(
        tmp_path,
        {"mp_rank_00": {"model": {name: stored}}},
        make_vocab_size_divisible_by=64,
        tensor_model_parallel_size=1,
    )

    def load(rows: int) -> Tensor:
        out = torch.empty(rows, 2)
        wanted = TensorRecord(
            key=name, global_shape=(rows, 2), dtype=out.dtype, pieces=(Piece((0, 0), out),)
        )
        with open_reader(folder) as reader:
            reader.load(wanted)
        return out

    assert torch.equal(load(70), stored[:70])
    for rows in (64, 129):
        with pytest.raises(CheckpointError, match=rf"shape \[128, 2\] in .* \[{rows}, 2\] in this"):
            load(rows)


def test_a_missing_rank_and_a_state_of_another_model_are_sentences(tmp_path: Path) -> None:
    model = {"model": {"decoder.final_layernorm.weight": torch.ones(3)}}
    folder = ranks(tmp_path / "a", {"mp_rank_00": model}, tensor_model_parallel_size=2)
    with pytest.raises(CheckpointDamaged, match="files of 1 ranks, .*-parallel-size 2:"):
        open_reader(folder)
    groups = [{"wd_mult": 0.0, "params": [0]}]
    state = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": groups}
    content = model | {"optimizer": state}
    with pytest.raises(CheckpointError, match=r"does not fit .* shape \[4\], \[3\] was expected"):
        open_reader(ranks(tmp_path / "b", {"mp_rank_00": content}))
    experts = ranks(tmp_path / "c", {"mp_rank_00_000": model}, expert_model_parallel_size=2)
    with pytest.raises(CheckpointDamaged, match="files of 1 ranks, .* --expert-model-parallel-si"):
        open_reader(experts)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gpt_torch_dist", "__0_1.distcp"),
        ("gpt_torch_dist", ".metadata"),
        ("gpt_torch_dist", "common.pt"),
        ("gpt_torch", "mp_rank_00/model_optim_rng.pt"),
        ("gpt_torch_tp2pp2_distopt", "mp_rank_01_000/distrib_optim.pt"),
    ],
)
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_damage_to_any_file_is_named(tmp_path: Path, name: str, file: str, damage: str) -> None:
    folder = unpack(tmp_path, name) / ITERATION
    path = folder / file
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    if (file, damage) == (".metadata", "flipped"):
        return  # a pickle has no checksum: it may still be one
    named = path.parent.name if damage == "gone" and "mp_rank" in file else path.name
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        all_tensors(folder)


@pytest.mark.parametrize("names", ["numbered", "named"])
@pytest.mark.feature("Checkpoints: state dicts of torch's own distributed format (torch_dcp) load")
def test_nested_state_dicts_of_torch_are_read(tmp_path: Path, names: str) -> None:
    whole = all_tensors(unpack(tmp_path, "gpt_torch") / ITERATION)
    model = {k: v for k, v in whole.items() if not k.startswith("optimizer.")}
    if names == "numbered":
        groups: list[dict[str, Any]] = []
        state: dict[Any, Any] = {}
        for wd_mult in (1.0, 0.0):
            mine = [k for k in model if (model[k].dim() > 1) == bool(wd_mult)]
            numbers = range(len(state), len(state) + len(mine))
            groups.append({"wd_mult": wd_mult, "params": list(numbers)})
            state |= {i: moments(whole, k) for i, k in zip(numbers, mine, strict=True)}
        optimizer: dict[str, Any] = {"state": state, "param_groups": groups}
        stored = model
    else:
        optimizer = {"state": {f"module.{k}": moments(whole, k) for k in model}}
        stored = {f"module.{k}": v for k, v in model.items()}
    args = argparse.Namespace(
        seq_length=8,
        consumed_train_samples=24,
        world_size=4,
        tensor_model_parallel_size=2,
    )
    content = {"model": stored, "optimizer": optimizer, "args": args, "iteration": 3}
    streams = {"rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()}}
    content["rng_state"] = [reference_rng(rng_state()) | streams]  # Megatron-LM: rank 0's alone
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = all_tensors(tmp_path / "dcp")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    with open_reader(tmp_path / "dcp") as reader:
        common = reader.common()
        states = [reader.rank_state(rank) is not None for rank in range(4)]
    assert states == [True, False, True, False]
    assert common["counters"]["consumed_train_samples"] == 24
    assert common["optimizer"]["step"] == 5.0


def moments(whole: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    kinds = ("exp_avg", "exp_avg_sq")
    return {kind: whole[f"optimizer.state.{kind}.{name}"] for kind in kinds} | {
        "step": torch.tensor(5.0)
    }


def gathered(source: Path, file: DcpFile, tensors: dict[str, Any]) -> dict[str, Any]:
    """State that the first replica has gathered: an object for each rank of a model."""
    objects = {}
    for group, buffers in buffers_of(source):
        key = f"optimizer.distributed.dp_group_idx_{group}.param_state/shard_0_1"
        objects[key] = file.add([buffers])
    return objects


def in_buckets(source: Path, file: DcpFile, tensors: dict[str, Any]) -> dict[str, Any]:
    """Every buffer as two buckets with padding behind each, divided over two replicas."""
    objects = {}
    for group, buffers in buffers_of(source):
        prefix = f"optimizer.distributed.dp_group_idx_{group}."
        unpadded = []
        for number in sorted(n for n in buffers if n != "buckets_coalesced"):
            ((dtypes, stored),) = buffers[number].items()
            total = stored["param"].numel()
            lengths = [total // 3, total - total // 3]
            unpadded.append({dtypes: lengths})
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                for bucket, values in enumerate(stored[kind].split(lengths)):
                    per_rank = -(-len(values) // 128) * 64
                    flat = torch.full((2, per_rank), torch.nan)
                    flat.view(-1)[: len(values)] = values
                    key = f"{prefix}gbuf_idx_{number}.dtype_{dtypes}.bucket_idx_{bucket}.{kind}"
                    pieces = []
                    for rank, begin, end in ((1, 0, per_rank), (0, 0, 40), (0, 40, per_rank)):
                        part = flat[rank : rank + 1, begin:end]
                        pieces.append(file.add_box([rank, begin], part))
                    shape = [2, per_rank]
                    tensors[key] = {"shape": shape, "dtype": "float32", "pieces": pieces}
        objects[f"{prefix}per_bucket_numel_unpadded/shard_0_1"] = file.add([unpadded])
    return objects


def buffers_of(source: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    for stage in range(2):
        for rank in range(2):
            path = source / f"mp_rank_{rank:02d}_{stage:03d}" / "distrib_optim.pt"
            yield stage * 2 + rank, torch.load(path, weights_only=True)


def in_torch_dist(tmp_path: Path, arrange: Any, **more: int) -> tuple[dict[str, Tensor], Path]:
    """Return the tensors of a checkpoint, and its copy in torch_dist with buffers of ``arrange``.

    ``more``: arguments of the run that wrote it.
    """
    source = unpack(tmp_path, "gpt_torch_tp2pp2_distopt") / ITERATION
    whole = all_tensors(source)
    folder = tmp_path / "torch_dist"
    folder.mkdir()
    tensors: dict[str, Any] = {}
    with new_file(folder, 0, 0, {}) as file:
        for key, values in whole.items():
            if not key.startswith("optimizer."):
                shape = list(values.shape)
                piece = file.add_box([0] * len(shape), values)
                tensors[key] = {"shape": shape, "dtype": "float32", "pieces": [piece]}
        objects = arrange(source, file, tensors)
    write_metadata(folder, tensors, objects, unflattened={})
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 2}
    args = argparse.Namespace(**sizes, **more)
    common = {"args": args, "iteration": 5, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")
    return whole, folder


@pytest.mark.feature(
    "Checkpoints: torch_dist with the optimizer gathered, in model space or bucket by bucket, loads"
)
@pytest.mark.parametrize("arrange", [gathered, in_buckets])
def test_state_in_buffers_is_read_from_torch_dist(tmp_path: Path, arrange: Any) -> None:
    whole, folder = in_torch_dist(tmp_path, arrange)
    found = all_tensors(folder)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)


def test_buckets_without_sizes_are_damaged(tmp_path: Path) -> None:
    def rename(source: Path, file: DcpFile, tensors: dict[str, Any]) -> dict[str, Any]:
        objects = in_buckets(source, file, tensors)
        for key in [key for key in tensors if ".dtype_" in key]:
            tensors[key.replace("torch.float32, ", "torch.float16, ")] = tensors.pop(key)
        return objects

    _, folder = in_torch_dist(tmp_path, rename)
    with pytest.raises(CheckpointDamaged, match="is damaged: a value in it does not fit"):
        all_tensors(folder)


def test_buffers_of_stages_that_the_layers_do_not_fill_are_refused(tmp_path: Path) -> None:
    _, folder = in_torch_dist(tmp_path, gathered, virtual_pipeline_model_parallel_size=2)
    message = f"{folder}: .*2 layers cannot be split over 4 stages.*; --no-load-optim does without"
    with pytest.raises(CheckpointError, match=message):
        all_tensors(folder)


def test_padding_as_large_as_that_of_the_run_is_read(tmp_path: Path) -> None:
    """Megatron-LM, resumed in another layout, keeps the padded size and not what it padded."""
    key = "embedding.word_embeddings.weight"
    rows = torch.zeros(100, 5)
    stored = torch.randn(256, 5)
    folder = ranks(tmp_path, {"mp_rank_00": {"model": {key: stored}}})
    piece = Piece((0, 0), rows)
    wanted = TensorRecord(key=key, global_shape=(100, 5), dtype=rows.dtype, pieces=(piece,))
    with open_reader(folder) as reader:
        hint = "with --padded-vocab-size 256 if the last 156 rows are padding"
        with pytest.raises(CheckpointError, match=f"has shape .*{hint}"):
            reader.load(replace(wanted, padded_rows=128))
        reader.load(replace(wanted, padded_rows=256))
    assert torch.equal(rows, stored[:100])
