"""The planner's arithmetic against published formulas; its bytes are held in tests/distributed."""

from __future__ import annotations

import contextlib
import sys

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.estimates.parameters import (
    adapter_parameters,
    encoder_parameters,
    projector_parameters,
)
from megatron.training.planning.run_plan import RunPlan, plan_lines, plan_run
from tests.support.command_lines import argv, run_of
from tools import plan as plan_tool
from tools import report_theoretical_memory

HIDDEN, LENGTH, LAYERS, BATCH = 64, 32, 4, 2  # of commands.GOOD
TOKENS = LENGTH * BATCH


def planned(words: str, world_size: int, rank: int = 0) -> RunPlan:
    words = f"--hidden-dropout 0 --attention-dropout 0 --bf16 {words}"
    return plan_run(run_of(words, world_size), rank)


@pytest.mark.feature("Planner: volume of communication by axis, counted as the model sends it")
def test_tensor_parallel_ranks_send_two_all_reduces_a_layer_and_pass() -> None:
    hidden_state = TOKENS * HIDDEN * 2  # bytes
    for words in ("", "--sequence-parallel"):
        plan = planned(f"--tensor-model-parallel-size 2 {words}", 2)
        (stage,) = plan.stages
        per_layer = 4 * hidden_state  # an all-reduce sends 2 (t - 1) / t times its tensor
        if words:  # the inputs of two products are gathered once more for the weight gradients
            per_layer += 2 * hidden_state // 2
        sent = stage.volumes["tp"].sent_bytes
        assert LAYERS * per_layer < sent < 1.35 * LAYERS * per_layer, "and what the ends need"


def test_the_distributed_optimizer_sends_gradients_out_and_parameters_back() -> None:
    plain, sharded = (
        planned(f"--accumulate-allreduce-grads-in-fp32 {words}", 4).stages[0]
        for words in ("", "--use-distributed-optimizer")
    )
    gradients, weights = sharded.cost.state.gradients, sharded.cost.state.parameters
    assert plain.volumes["dp"].sent_bytes == 2 * 3 / 4 * gradients
    norm = 24  # a pair of fp64 numbers goes around the same ranks
    assert sharded.volumes["dp"].sent_bytes == 3 / 4 * (gradients + weights) + norm
    assert sharded.cost.state.optimizer == pytest.approx(plain.cost.state.optimizer / 4, rel=0.01)


@pytest.mark.feature("Planner: any rank of 16,384 in seconds")
def test_stages_of_a_large_world_have_their_bubble_and_messages() -> None:
    words = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"
    plan = planned(f"{words} --global-batch-size 8192", 16384, rank=16383)
    assert [stage.rank for stage in plan.stages] == [4095, 8191, 12287, 16383]
    micro_batches = 8192 // (512 * BATCH)
    assert plan.num_microbatches == micro_batches
    assert plan.bubble == pytest.approx(3 / micro_batches)
    message = TOKENS * HIDDEN * 2
    sent = [stage.volumes["pp"].sent_bytes for stage in plan.stages]
    assert sent == [n * micro_batches * message for n in (1, 2, 2, 1)]
    kept = [stage.activations for stage in plan.stages[:-1]]
    assert kept == sorted(kept, reverse=True), "the first stage has most micro-batches in flight"
    assert "  ".join(plan_lines(plan)).count("(8)") >= 2


def test_more_micro_batches_than_are_looked_at_change_no_memory() -> None:
    words = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    few, many = (planned(f"{words} --global-batch-size {n * BATCH}", 2) for n in (8, 800))
    assert [s.peak for s in few.stages] == [s.peak for s in many.stages]
    assert many.bubble == pytest.approx(few.bubble / 100, rel=0.01)
    for one, other in zip(few.stages, many.stages, strict=True):
        assert other.volumes["pp"].sent_bytes == 100 * one.volumes["pp"].sent_bytes


def test_the_tools_take_the_flags_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = argv("--check-world-size 2 --tensor-model-parallel-size 2 --sequence-parallel")
    for tool, first in (
        (plan_tool, "this run can start on 2 ranks"),
        (report_theoretical_memory, "Number of parameters in transformer layers in billions:"),
    ):
        monkeypatch.setattr(sys, "argv", [tool.__file__, *flags])
        with pytest.raises(SystemExit) if tool is plan_tool else contextlib.nullcontext():
            tool.main()
        assert capsys.readouterr().out.startswith(first)


def test_instances_of_fully_sharded_models_are_planned() -> None:
    words = (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
    )
    one, two = (
        planned(f"{words} {more}", 4).stages[0].cost.state
        for more in ("", "--num-distributed-optimizer-instances 2")
    )
    assert two.parameters == pytest.approx(2 * one.parameters, rel=0.01)


def test_an_optimizer_in_host_memory_is_not_on_the_device() -> None:
    words = "--device cuda --bf16 --optimizer-cpu-offload --optimizer-offload-fraction"
    here, half, away = (planned(f"{words} {f}", 1).stages[0].cost.state for f in (0, 0.6, 1))
    assert (here.host, away.optimizer) == (0, 0)
    assert 0 < half.optimizer < here.optimizer
    copied = here.parameters + here.gradients  # on their way
    # The host has fp32 main parameters, the device their 16-bit remainders.
    more = copied + here.parameters
    assert away.host == here.optimizer + more
    steps = 4  # the count of steps is in both places
    assert 0 < half.host - (here.optimizer - half.optimizer + steps) < more
    assert any("in host memory" in line for line in plan_lines(planned(f"{words} 1", 1)))


@pytest.mark.feature("LoRA: memory of the state is that of adapters and stored weights")
@pytest.mark.parametrize(("format", "bytes_each"), [("", 2), ("int8", 1), ("nvfp4", 0.5625)])
def test_the_state_of_a_run_with_adapters_is_small(format: str, bytes_each: float) -> None:
    sizes = "--hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 4 --disable-bias-linear"
    words = f"{sizes} --lora-rank 4" + (f" --lora-base-dtype {format}" if format else "")
    run = run_of(f"--bf16 {words}", 1)
    adapters = adapter_parameters(run, 128)
    frozen = 4 * (4 * 256 * 256 + 2 * 256 * 1024)
    state = planned(words, 1).stages[0].cost.state
    rest = planned(sizes, 1).stages[0].cost.num_parameters - frozen  # norms, embeddings
    per_adapter = 2 + 4 + 4 + 8  # weight, gradient, main parameter, moments
    whole = state.parameters + state.gradients + state.optimizer
    assert whole <= 1.1 * (bytes_each * frozen + 2 * rest + per_adapter * adapters)


def test_a_plan_reports_adapters_of_layers_that_the_model_lacks() -> None:
    with pytest.raises(ConfigError, match="--lora-target-modules nope: the model has no layer"):
        planned("--lora-rank 4 --lora-target-modules nope", 1)


def test_tensor_parallel_ranks_that_read_no_data_need_as_much() -> None:
    words = "--model-kind vlm --img-h 24 --img-w 24 --patch-dim 6 --use-tiling --max-num-tiles 3"
    reads, receives = (
        planned(f"{words} --tensor-model-parallel-size 2", 2, rank).stages[0] for rank in (0, 1)
    )
    assert receives.cost.state == reads.cost.state
    assert receives.activations == reads.activations


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --freeze-LM", 4),
        ("--context-parallel-size 2 --use-distributed-optimizer --freeze-ViT", 2),
    ],
)
def test_the_first_stage_has_the_estimated_encoder_and_projector(
    layout: str, world_size: int
) -> None:
    images = "--model-kind vlm --img-h 24 --img-w 24 --patch-dim 6 --vision-hidden-size 48 "
    images += "--vision-num-attention-heads 6 --vision-model-type internvit300M"
    run = run_of(f"{images} {layout}", world_size)
    frozen = "--freeze-LM", "--freeze-ViT"
    text = " ".join(word for word in layout.split() if word not in frozen)
    no_table = "--position-embedding-type none"  # its size follows from that of images
    both = planned(f"{images} {layout} {no_table}", world_size).stages
    language = planned(f"{text} {no_table}", world_size).stages
    more = [
        stage.cost.num_parameters - other.cost.num_parameters
        for stage, other in zip(both, language, strict=True)
    ]
    expected = encoder_parameters(run) + projector_parameters(run)
    assert more == [expected] + [0] * (len(both) - 1)
