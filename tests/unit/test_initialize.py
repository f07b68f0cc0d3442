"""Start-up before any process group: what each rank prints, and what the launcher is told."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.device import cpu_tuning
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.training import initialize
from megatron.training.checkpointing.save import save_run
from megatron.training.initialize import _init_default_group, configure, fail
from tests.support.command_lines import argv, run_of
from tests.support.tiny_run import counters, make_parts, options


def check(words: str, without: tuple[str, ...] = ()) -> int | str | None:
    """Exit status of --check-only."""
    with pytest.raises(SystemExit) as ended:
        configure(argv=argv(f"--check-only {words}", without))
    return ended.value.code


def test_the_plan_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, first_line in (("0", "this run can start on 2 ranks"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert check("") == 0
        assert capsys.readouterr().out.partition("\n")[0] == first_line


def test_flags_that_need_a_gpu_say_so_where_none_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_here() -> None:
        raise InterruptedError

    monkeypatch.setattr(device, "is_cuda", lambda: False)
    monkeypatch.setattr(device, "choose", lambda asked, rank: None)
    monkeypatch.setattr(cpu_tuning, "keep_freed_memory", end_here)
    config = configure(argv=argv("--moe-grouped-gemm --num-experts 2 --record-memory-history"))
    with pytest.raises(InterruptedError):
        initialize.start(config)
    out = capsys.readouterr().out
    for flag in ("--moe-grouped-gemm", "--record-memory-history"):
        assert f"WARNING: {flag} is without effect: it needs a GPU" in out


def test_nccl_registers_no_memory_for_graphs_that_pytorch_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")  # so that it is put back
    for conf, expected in (("max_split_size_mb:64", None), ("expandable_segments:True", "0")):
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
        _init_default_group(run_of("--enable-cuda-graph --device auto"), None)
        assert os.environ.get("NCCL_GRAPH_REGISTER") == expected
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-model-parallel-size 2", "parallel-size 2: gloo cannot send tensors of a GPU"),
        ("--context-parallel-size 2", "--cp-comm-type p2p: gloo cannot send tensors of a GPU"),
        ("--context-parallel-size 2 --cp-comm-type a2a", None),
        ("--tensor-model-parallel-size 2 --sequence-parallel", None),
    ],
)
def test_gloo_takes_tensors_of_a_gpu_in_collectives_only(
    flags: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)

    def start(flags: str, on: str) -> None:
        config = run_of(f"{flags} --distributed-backend gloo --device {on}", world_size=2)
        with device.simulate_device("cuda"):
            _init_default_group(config, None)

    for on in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            start(flags, on)


def test_conflicts_are_printed_once_and_the_other_ranks_wait_to_be_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    for rank, words, waited in (("0", "--bf16 and --fp16 exclude each other", 0), ("1", "", 1)):
        monkeypatch.setenv("RANK", rank)
        assert check("--bf16 --fp16") == 2
        out = capsys.readouterr().out
        assert words in out if words else not out
        assert len(waits) == waited


def test_a_plan_takes_the_model_from_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(options(tmp_path), make_parts(), counters(1), asked={"num_layers": 2})
    words = f"--use-checkpoint-args --load {tmp_path}"
    assert check(words, without=("--num-layers",)) == 0
    assert "Setting num_layers to 2 from checkpoint" in capsys.readouterr().out


def test_a_missing_load_is_told_together_with_other_conflicts() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(argv=argv("--use-checkpoint-args --bf16 --fp16"))
    assert "--use-checkpoint-args needs --load" in str(caught.value)
    assert "--bf16 and --fp16 exclude each other" in str(caught.value)


def test_the_launcher_repeats_what_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    fail(ConfigError("--lr is required"))
    assert capsys.readouterr().err == "ConfigError: --lr is required\n"
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ConfigError: --lr is required"


def test_a_report_of_one_reason_is_counted_in_the_singular(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    fail(ConfigError("this run cannot start:\n  --lr is required"))
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    expected = "ConfigError: this run cannot start (1 reason, printed above)"
    assert message["message"] == expected


def test_ranks_that_nobody_launched_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, .* start with torchrun"):
        _init_default_group(configure(argv=argv("")))


def test_a_description_of_layers_is_kept_with_the_run(tmp_path: Path) -> None:
    """A checkpoint holds the text: it may not name a file to open."""
    path = tmp_path / "layers.json"
    namespace = argparse.Namespace(
        heterogeneous_layers_config_path=str(path), heterogeneous_layers_config_encoded_json=None
    )
    with pytest.raises(ConfigError, match=r"--heterogeneous-layers-config-path .*cannot be read"):
        initialize._read_layers(namespace)
    path.write_text('{"block_configs": []}')
    initialize._read_layers(namespace)
    assert namespace.heterogeneous_layers_config_encoded_json == '{"block_configs": []}'


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"num_attention_heads": "x", "block_configs": []}',
        *(
            f'{{"block_configs": [{block}]}}'
            for block in (
                "5",
                '{"attention": 5}',
                '{"ffn": "x"}',
                '{"attention": {"n_heads_in_group": 0}}',
                '{"attention": {"n_heads_in_group": [1]}}',
                '{"ffn": {"ffn_mult": "x"}}',
                '{"ffn": {"ffn_mult": 1e400}}',
                '{"ffn": {"ffn_mult": NaN}}',
                '{"ffn": {"ffn_mult": -1}}',
            )
        ),
    ],
)
def test_a_forged_description_of_layers_is_refused(text: str) -> None:
    config = mock.Mock(heterogeneous_layers_config_encoded_json=text)
    with pytest.raises(ConfigError, match="--heterogeneous-layers-config-path") as error:
        layer_shapes(config)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("error", [None, ValueError("of a rank")])
def test_a_script_that_fails_does_not_wait_for_collectives_of_nccl(
    monkeypatch: pytest.MonkeyPatch, backend: str, error: ValueError | None
) -> None:
    calls = mock.Mock()
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", calls.destroy)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", calls.abort)
    initialize._end()
    is_aborted = backend == "nccl" and error is not None
    assert calls.mock_calls == [mock.call.abort() if is_aborted else mock.call.destroy()]
