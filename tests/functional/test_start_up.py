"""What a run imports before its first step: by names, as times differ from machine to machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.core.dist_checkpointing.formats import FORMATS, READERS
from megatron.training.config.language_model import MODEL_KINDS
from megatron.training.models.registry import model_kind
from tests.repo.source import ROOT
from tests.support.runs import TINY
from tools import plan

# Of a GPT without flags: kinds of model and file that it has not, the planner, compilers.
LEFT_OUT = (
    "megatron.core.dist_checkpointing.megatron_formats.",
    "megatron.core.ssm.mamba_mixer",
    "megatron.core.virtual_ranks.threads",
    "megatron.training.models.bert",
    "megatron.training.models.gpt",
    "megatron.training.models.t5",
    "megatron.training.planning.check",
    "megatron.training.planning.rank",
    "megatron.training.planning.run_plan",
    "megatron.training.planning.tracing",
    "torch._dynamo",
    "torch._inductor",
    "torch.testing",
    "torch.utils.tensorboard",
)
IMPORTED = {"isal", "megatron", "numpy", "pretrain_gpt", "torch", *sys.stdlib_module_names}
_NEW = "import sys, torch; b = {*sys.modules}; import pretrain_gpt; print(*({*sys.modules} - b))"

PLANNED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --tensor-model-parallel-size 2 --num-experts 4 "
    "--expert-model-parallel-size 2 --sequence-parallel --check-world-size 8"
)


def test_a_run_imports_nothing_heavy_that_it_does_not_use() -> None:
    command = [sys.executable, "-c", _NEW]
    new = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = new.split()
    assert "megatron.core.models.gpt.gpt_model" in names
    assert {name.partition(".")[0] for name in names} <= IMPORTED
    assert [name for name in names if name.startswith(LEFT_OUT)] == []


def test_a_plan_imports_neither_the_compiler_of_torch_nor_sympy() -> None:
    """They take 1.5 s and 0.4 s; torch's shape functions import them at the first call."""
    plan = "import runpy; runpy.run_path('tools/plan.py', run_name='__main__')"
    told = "atexit.register(lambda: print({'torch._dynamo', 'sympy'} & {*sys.modules}))"
    then = f"import atexit, sys; {told}; {plan}"
    command = [sys.executable, "-c", then, *PLANNED.split()]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("this run can start on 8 ranks")
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_plan_of_a_file_that_is_missing_ends_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["plan.py", "--config", "none.yaml"])
    with pytest.raises(SystemExit, match="2"):
        plan.main()
    assert capsys.readouterr().err.startswith("ConfigError: --config none.yaml: no such file")


def test_what_is_left_out_is_found_when_it_is_asked_for() -> None:
    assert [model_kind(name).load().build.__name__ for name in MODEL_KINDS] == [
        f"build_{name}_model" for name in MODEL_KINDS
    ]
    assert [format.name for format in FORMATS.values()] == list(FORMATS)
    assert {READERS[name].__name__ for name in (*FORMATS, "library") if name in READERS} == {
        "CheckpointReader", "TorchDistReader", "TorchLegacyReader", "TorchDcpReader", "LibraryFiles"
    }  # fmt: skip


def test_a_star_imports_what_is_left_out() -> None:
    found: dict[str, object] = {}
    exec("from megatron.core.tensor_parallel import *", found)
    exec("from megatron.core.extensions.transformer_engine import *", found)
    assert {"ColumnParallelLinear", "checkpoint", "TENorm", "SplitAlongDim"} <= found.keys()
    assert "random" not in found  # a script's own module of this name


_COLLECTOR = """
import gc
def refuse(): raise AssertionError("an import switches the garbage collector")
gc.disable = gc.enable = gc.freeze = refuse
import pretrain_bert, pretrain_gpt, pretrain_mamba, pretrain_t5
"""


def test_an_import_leaves_the_garbage_collector_as_it_is() -> None:
    subprocess.run([sys.executable, "-c", _COLLECTOR], cwd=ROOT, check=True)


_PROGRAM = """
import gc, runpy
from unittest import mock
calls = mock.Mock()
def stop(*_, **__): raise SystemExit(f"{calls.mock_calls}")
with mock.patch("megatron.training.process.early_sigterm.gc", calls):
    import megatron.training.training as training
    training.pretrain = stop
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""


def test_a_program_imports_without_the_garbage_collector() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr
    assert said.strip() == "[call.disable(), call.freeze(), call.enable()]"


_AT_EXIT = """
import atexit, os, runpy, sys

def report():
    tasks = (f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task"))
    print("threads at exit:", *(open(task).read().strip() for task in tasks))

atexit.register(report)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_no_thread_of_a_process_group_is_left_when_the_interpreter_finalizes() -> None:
    """Such a thread may release a tensor then: the process aborts after its work is done."""
    flags = [*TINY, "--train-iters", "2", "--exit-interval", "1", "--distributed-backend", "gloo"]
    command = [sys.executable, "-c", _AT_EXIT, "pretrain_gpt.py", *flags]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "threads at exit:" in said
    assert "gloo" not in said.partition("threads at exit:")[2]
