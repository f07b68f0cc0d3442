"""A run saved and loaded, in one process."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron
from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.plain_values import plain
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.tensor_parallel.random import get_rng_tracker, model_parallel_seed
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.checkpointing.save import save_run
from megatron.training.config.checkpoint import CheckpointConfig
from tests.support.tiny_run import (
    advance,
    assert_equal,
    counters,
    make_parts,
    options,
    values,
)

ASKED = {"num_layers": 2, "swiglu": True, "lr": 1e-3, "data_path": ["0.5", "a"], "spec": None}


def save(root, parts, iteration, **more):
    return save_run(options(root, **more), parts, counters(iteration), asked=ASKED)


@pytest.fixture
def saved(tmp_path):
    """A run after 3 steps, saved at iteration 3."""
    parts = make_parts()
    advance(parts, 3)
    save(tmp_path, parts, 3)
    return parts


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(saved, tmp_path):
    resumed = make_parts(seed=5)
    loaded = load_run(options(tmp_path), resumed)
    assert loaded.iteration == 3
    assert loaded.counters == counters(3)
    assert_equal(values(resumed), values(saved))
    for parts in (saved, resumed):
        advance(parts, 4)
    assert_equal(values(resumed), values(saved))


def draw():
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item()]
    with get_rng_tracker().fork():
        numbers.append(torch.rand(1).item())
    return numbers


def test_every_random_stream_goes_on(tmp_path):
    model_parallel_seed(7, tp_rank=0)
    random.seed(7)
    np.random.seed(7)
    draw()
    save(tmp_path, make_parts(), 1)
    expected = [draw(), draw()]
    model_parallel_seed(8, tp_rank=0)
    random.seed(8)
    np.random.seed(8)
    load_run(options(tmp_path), make_parts())
    assert [draw(), draw()] == expected


def test_random_states_are_left_alone_when_asked(tmp_path):
    model_parallel_seed(7, tp_rank=0)
    save(tmp_path, make_parts(), 1)
    random.seed(3)
    expected = random.random()
    random.seed(3)
    load_run(options(tmp_path, no_load_rng=True), make_parts())
    assert random.random() == expected


def test_the_reference_s_messages(saved, tmp_path, capsys):
    save(tmp_path, saved, 6)
    load_run(options(tmp_path), make_parts())
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"saving checkpoint at iteration       6 to {tmp_path} in safetensors_dist format",
        f"  successfully saved checkpoint from iteration       6 to {tmp_path} [ t 1/1, p 1/1 ]",
        f" loading distributed checkpoint from {tmp_path} at iteration 6",
        " checkpoint version 3.0",
        f"  successfully loaded checkpoint from {tmp_path} [ t 1/1, p 1/1 ] at iteration 6",
    ]
    assert (tmp_path / TRACKER).read_text() == "6"


# -- parts of a checkpoint ------------------------------------------------------------------


def test_no_save_optim_leaves_the_optimizer_out_and_the_load_says_so(tmp_path):
    parts = make_parts()
    advance(parts, 2)
    save(tmp_path, parts, 2, no_save_optim=True)
    with CheckpointReader(tmp_path / "iter_0000002") as reader:
        assert not [key for key in reader.tensors if key.startswith("optimizer")]
    with pytest.raises(CheckpointError, match="--no-save-optim.*use --no-load-optim or --finetune"):
        load_run(options(tmp_path), make_parts())
    loaded = make_parts(seed=4)
    assert load_run(options(tmp_path, no_load_optim=True), loaded).iteration == 2
    assert torch.equal(loaded.model_chunks[0].counts, parts.model_chunks[0].counts)


def test_no_save_rng_leaves_the_random_states_out_and_the_load_says_so(tmp_path):
    save(tmp_path, make_parts(), 2, no_save_rng=True)
    with pytest.raises(CheckpointError, match="--no-save-rng.*use --no-load-rng or --finetune"):
        load_run(options(tmp_path), make_parts())
    assert load_run(options(tmp_path, no_load_rng=True), make_parts()).iteration == 2


def test_no_load_optim_takes_the_weights_and_gives_them_to_the_main_parameters(saved, tmp_path):
    parts = make_parts(seed=4)
    load_run(options(tmp_path, no_load_optim=True), parts)
    assert (parts.optimizer.num_steps, parts.scheduler.num_steps) == (0, 0)
    assert_equal(parts.model_chunks[0].state_dict(), saved.model_chunks[0].state_dict())
    for param, state in zip(parts.optimizer.params, parts.optimizer.state, strict=True):
        assert torch.equal(state["fp32_param"], param)
        assert not state["exp_avg"].any()


def test_finetune_takes_weights_only_and_counts_from_0(saved, tmp_path, capsys):
    parts = make_parts(seed=4)
    loaded = load_run(options(tmp_path, finetune=True), parts)
    assert (loaded.iteration, loaded.counters) == (0, {})
    assert parts.optimizer.num_steps == 0
    assert_equal(parts.model_chunks[0].state_dict(), saved.model_chunks[0].state_dict())
    out = capsys.readouterr().out.splitlines()
    assert f" loading distributed checkpoint from {tmp_path}" in out


def test_a_run_without_an_optimizer_loads_the_weights(saved, tmp_path):
    parts = dataclasses.replace(make_parts(seed=4), optimizer=None, scheduler=None)
    assert load_run(options(tmp_path), parts).iteration == 3
    assert_equal(parts.model_chunks[0].state_dict(), saved.model_chunks[0].state_dict())


def test_a_release_has_weights_only(saved, tmp_path, capsys):
    (tmp_path / "iter_0000003").rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    assert load_run(options(tmp_path), make_parts(seed=4)).iteration == 0
    assert f" loading release distributed checkpoint from {tmp_path}" in capsys.readouterr().out


def test_pretrained_checkpoint_is_taken_until_the_run_has_its_own(saved, tmp_path):
    own = tmp_path / "own"
    config = options(own, pretrained_checkpoint=str(tmp_path))
    parts = make_parts(seed=4)
    assert load_run(config, parts).iteration == 0
    assert_equal(parts.model_chunks[0].state_dict(), saved.model_chunks[0].state_dict())
    save(own, parts, 9)
    assert load_run(config, make_parts()).iteration == 9
    with pytest.raises(CheckpointError, match="--pretrained-checkpoint .*x holds no checkpoint"):
        load_run(options(tmp_path / "none", pretrained_checkpoint=str(tmp_path / "x")), parts)


def test_ckpt_step_picks_an_iteration(saved, tmp_path):
    save(tmp_path, saved, 6)
    assert load_run(options(tmp_path, ckpt_step=3), make_parts()).iteration == 3
    with pytest.raises(CheckpointError, match="--ckpt-step 4"):
        load_run(options(tmp_path, ckpt_step=4), make_parts())


def test_a_folder_itself_may_be_loaded(saved, tmp_path):
    save(tmp_path, saved, 6)
    config = options(tmp_path, load=str(tmp_path / "iter_0000003"))
    assert load_run(config, make_parts()).iteration == 3


def test_a_renamed_folder_keeps_its_iteration_and_the_run_says_so(saved, tmp_path, capsys):
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000008")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    assert load_run(options(tmp_path), make_parts()).iteration == 3
    assert (
        f"WARNING: {tmp_path / 'iter_0000008'} was saved at iteration 3 and renamed since: "
        "iteration 3 is used, not the one in the name\n"
    ) in capsys.readouterr().out


# -- nothing to load ------------------------------------------------------------------------


def test_without_load_nothing_is_loaded(tmp_path):
    assert load_run(CheckpointConfig(save=str(tmp_path)), make_parts()) is None


def test_a_new_run_may_load_from_where_it_saves(tmp_path, capsys):
    config = CheckpointConfig(save=str(tmp_path / "new"), load=str(tmp_path / "." / "new"))
    assert load_run(config, make_parts()) is None
    out = capsys.readouterr().out
    assert f"could not find the metadata file {tmp_path}/new/{TRACKER}" in out
    assert "    will not load any checkpoints and will start from random" in out


def test_a_load_that_names_nothing_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"--load .*typo holds no checkpoint: correct"):
        load_run(options(tmp_path, load=str(tmp_path / "typo")), make_parts())


@pytest.mark.parametrize("flag", ["load", "pretrained_checkpoint"])
def test_a_hugging_face_folder_without_weights_is_an_error(tmp_path, flag):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor pytorch_model.bin"):
        load_run(CheckpointConfig(**{flag: str(tmp_path)}), make_parts())


def test_a_load_that_is_no_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--load .*file cannot be read: .*Not a directory"):
        load_run(CheckpointConfig(load=str(tmp_path / "file")), make_parts())


def test_exit_on_missing_checkpoint_is_an_error_also_for_a_new_run(tmp_path):
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint: .* holds no"):
        load_run(options(tmp_path, exit_on_missing_checkpoint=True), make_parts())
    config = CheckpointConfig(exit_on_missing_checkpoint=True)
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint: --load is not given"):
        load_run(config, make_parts())


def test_a_directory_that_cannot_be_written_to_is_found_at_start_up(tmp_path):
    (tmp_path / "file").write_text("")
    config = CheckpointConfig(save=str(tmp_path / "file" / "x"))
    with pytest.raises(CheckpointError, match="--save .*file/x cannot be written to: .*Not a dir"):
        load_run(config, make_parts())


# -- checkpoints that do not fit, or are damaged --------------------------------------------


def test_another_model_is_named(saved, tmp_path):
    parts = make_parts()
    parts.model_chunks[0].register_buffer("more", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"needs 1 tensors that it does not hold: more;"):
        load_run(options(tmp_path), parts)
    parts = make_parts()
    del parts.model_chunks[0].counts
    with pytest.raises(
        CheckpointError, match=r"holds 1 tensors that this run does not have: counts;"
    ):
        load_run(options(tmp_path), parts)
    assert load_run(options(tmp_path, dist_ckpt_strictness="raise_unexpected"), parts) is not None


def test_another_shape_is_named_with_both(saved, tmp_path):
    parts = make_parts()
    parts.model_chunks[0].counts = torch.zeros(4)
    with pytest.raises(
        CheckpointError, match=r"counts has shape \[3\] in the checkpoint and \[4\]"
    ):
        load_run(options(tmp_path), parts)


def test_another_precision_is_an_error_unless_asked_for(saved, tmp_path):
    with pytest.raises(CheckpointError, match="has dtype float32 in the checkpoint and bfloat16"):
        load_run(options(tmp_path, no_load_optim=True), make_parts(dtype=torch.bfloat16))
    parts = make_parts(seed=4, dtype=torch.bfloat16)
    config = options(tmp_path, no_load_optim=True, load_main_params_from_ckpt=True)
    load_run(config, parts)
    full = dict(saved.model_chunks[0].named_parameters())
    for (name, param), state in zip(
        parts.model_chunks[0].named_parameters(), parts.optimizer.state, strict=True
    ):
        assert torch.equal(param, full[name].bfloat16())
        assert torch.equal(state["fp32_param"], full[name])  # not rounded on the way


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.feature("Checkpoints: a cut, altered or missing file is found and named")
@pytest.mark.parametrize("name", ["__0_0.safetensors", "common.json", "__0_state.json"])
def test_a_damaged_checkpoint_stops_the_run_unless_an_older_one_is_asked_for(
    saved, tmp_path, name, capsys
):
    expected = values(saved)
    advance(saved, 3)
    save(tmp_path, saved, 6)
    flip_a_bit(tmp_path / "iter_0000006" / name)
    with pytest.raises(CheckpointDamaged, match=rf"{name}.*; --load-newest-valid loads"):
        load_run(options(tmp_path), make_parts())
    parts = make_parts(seed=4)
    loaded = load_run(options(tmp_path, load_newest_valid=True), parts)
    assert loaded.iteration == 3
    assert_equal(values(parts), expected)
    assert f"{name} is damaged" in capsys.readouterr().out
    flip_a_bit(tmp_path / "iter_0000003" / name)
    with pytest.raises(CheckpointDamaged, match="there is no older checkpoint"):
        load_run(options(tmp_path, load_newest_valid=True), parts)


def test_a_published_folder_without_its_manifest_is_damaged(saved, tmp_path):
    (tmp_path / "iter_0000003" / "metadata.json").unlink()
    with pytest.raises(CheckpointDamaged, match="iter_0000003/metadata.json is missing"):
        load_run(options(tmp_path), make_parts())


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("metadata.json", json.dumps({"sharded_backend": "zarr"}), "zarr"),
    ],
)
def test_a_checkpoint_of_another_format_is_named(tmp_path, name, content, kind):
    path = tmp_path / "iter_0000004" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    (tmp_path / TRACKER).write_text("4")
    with pytest.raises(
        CheckpointError, match=rf"a checkpoint of format {kind}; supported formats:"
    ):
        load_run(options(tmp_path), make_parts())


def test_going_back_by_hand_is_told(saved, tmp_path, capsys):
    save(tmp_path, saved, 6)
    (tmp_path / TRACKER).write_text("3")
    assert load_run(options(tmp_path), make_parts()).iteration == 3
    out = capsys.readouterr().out
    assert "set back to 3: iter_0000006 is newer and is not loaded" in out


def test_random_states_of_another_layout_are_left_with_a_message(saved, tmp_path, capsys):
    parts = make_parts()
    other = dataclasses.replace(parts.groups.dense_grid, sizes={"tp": 1, "dp": 1})
    parts = dataclasses.replace(parts, groups=dataclasses.replace(parts.groups, dense_grid=other))
    assert load_run(options(tmp_path), parts).iteration == 3
    assert "random states, and the state of a step" in capsys.readouterr().out


# -- saving ---------------------------------------------------------------------------------


def test_retention_keeps_multiples_and_the_newest(tmp_path, capsys):
    parts = make_parts()
    deleted = [
        save(tmp_path, parts, iteration, save_retain_interval=4).deleted
        for iteration in (2, 4, 6, 8, 10)
    ]
    assert deleted == [(), (2,), (), (6,), ()]
    names = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert names == ["iter_0000004", "iter_0000008", "iter_0000010"]
    line = f"  successfully deleted checkpoint from iteration       2 at {tmp_path}"
    assert line in capsys.readouterr().out.splitlines()


def test_retention_deletes_nothing_when_the_save_failed(tmp_path, monkeypatch):
    parts = make_parts()
    save(tmp_path, parts, 2, save_retain_interval=4)
    monkeypatch.setenv("FAULTS", "save.before_rename:enospc")
    with pytest.raises(SaveFailed):
        save(tmp_path, parts, 3, save_retain_interval=4)
    assert (tmp_path / "iter_0000002").is_dir()


def test_the_configuration_lies_beside(tmp_path):
    save_run(
        options(tmp_path),
        make_parts(),
        counters(1),
        asked={},
        write_config=lambda path: path.write_text("{}"),
    )
    assert (tmp_path / "iter_0000001" / "config.yaml").read_text() == "{}"


def test_what_json_cannot_hold_becomes_text():
    asked = {"a": Path("x"), "b": (1, 2.5), "c": torch.float16, "d": {3: None}}
    assert plain(asked) == {"a": "x", "b": [1, 2.5], "c": "torch.float16", "d": {"3": None}}


def test_wrapped_modules_and_shared_tensors_have_one_key(tmp_path):
    inner = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
    inner.add_module("tied", torch.nn.Linear(2, 3, bias=False))
    inner.tied.weight = inner[0].weight
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = inner
    parts = dataclasses.replace(
        make_parts(), model_chunks=[wrapped], optimizer=None, scheduler=None
    )
    save(tmp_path, parts, 1)
    with CheckpointReader(tmp_path / "iter_0000001") as reader:
        assert list(reader.tensors) == ["0.weight"]


def test_a_checkpoint_is_opened_with_nothing_but_its_directory(saved, tmp_path):
    content = open_checkpoint(tmp_path)
    assert content.iteration == 3
    assert content.asked == ASKED
    assert open_checkpoint(content.folder).iteration == 3
    assert open_checkpoint(tmp_path, step=3).folder == content.folder
    with CheckpointReader(content.folder) as reader:
        weight = reader.read("layers.0.proj.weight")
    assert torch.equal(weight, saved.model_chunks[0].layers_0_proj_weight)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path / "nowhere")


def test_files_hold_no_pickle_and_the_code_knows_none(saved, tmp_path):
    for path in (tmp_path / "iter_0000003").iterdir():
        assert path.suffix in {".json", ".safetensors"}
        assert not path.read_bytes().startswith((b"\x80", b"PK"))
    home = Path(megatron.__file__).parent if megatron.__file__ else Path("megatron")
    for room in ("core/dist_checkpointing", "training/checkpointing"):
        for path in (home / room).rglob("*.py"):
            if path.parent.name == "megatron_formats":
                continue  # a law says which of its files knows pickles
            tree = ast.parse(path.read_text())
            imported = {
                name.name
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for name in node.names
            }
            called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not imported & {"pickle", "dill", "marshal", "shelve", "mmap"}, path
            assert not called & {"gather_object", "broadcast_object_list", "memmap"}, path
            assert "torch.save" not in path.read_text(), path


def test_a_program_that_does_not_train_reports_the_iteration_of_the_checkpoint(
    saved, tmp_path, capsys
):
    weights = dataclasses.replace(make_parts(), optimizer=None, scheduler=None)
    for parts, told in ((weights, 3), (make_parts(), 0)):  # --finetune counts from 0
        capsys.readouterr()
        assert load_run(options(tmp_path, finetune=True), parts).iteration == 0
        assert f"[ t 1/1, p 1/1 ] at iteration {told}\n" in capsys.readouterr().out
