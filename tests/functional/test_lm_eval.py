"""lm-eval scores a checkpoint as its own backend scores the same model in Hugging Face's form.

It does so with the model ``megatron``, and as a client of the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron.training.conversion.convert import ConversionRequest, convert
from tests.support.server_process import ROOT, started
from tests.support.tokenizer_files import corpus_texts

pytest.importorskip("lm_eval", reason="needs lm-eval")
pytest.importorskip("accelerate", reason="lm-eval's backend hf needs it")
families = pytest.importorskip("tests.support.generation_families", reason="needs transformers")

THEIRS = [sys.executable, "-m", "lm_eval"]
OURS = ["tools/run_lm_eval.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
LENGTH = 254  # tokens of a window: some documents have more; a client needs two positions more
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text[:120]}}",
        "doc_to_choice": "{{[text[120:150], text[10:40], ' nothing of this']}}",
        "doc_to_target": 0,
        "target_delimiter": "",
    },
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}"},
    "until": {
        "output_type": "generate_until",
        "doc_to_text": "{{text[:100]}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 40, "do_sample": False},
    },
}
TOLERANCE = 1e-4


def write_model(folder: Path) -> None:
    """Write a model with its tokenizer to ``folder``/theirs, and converted to ``folder``/ours."""
    families.write_llama(folder / "theirs")
    convert(
        ConversionRequest(
            source=folder / "theirs",
            target=folder / "ours",
            format="safetensors_dist",
            verify=False,
        )
    )


def write_tasks(folder: Path) -> None:
    """Write three tasks over documents of the golden corpus."""
    folder.mkdir()
    texts = [text[:3000] for text in corpus_texts() if len(text) > 200][50:60]
    documents = [json.dumps({"text": text}) for text in texts]
    (folder / "documents.jsonl").write_text("\n".join(documents))
    for name, task in TASKS.items():
        common = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
            "test_split": "test",
            "doc_to_text": "",
        }
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}))  # YAML has JSON


def evaluate(
    folder: Path, program: list[str], model: str, arguments: str, batch_size: int = 1
) -> dict[str, Any]:
    """Return the responses of each task."""
    out = Path(tempfile.mkdtemp(dir=folder))
    tasks = ",".join(f"local_{name}" for name in TASKS)
    command = [*program, "--model", model, "--model_args", arguments]
    command += ["--tasks", tasks, "--include_path", str(folder / "tasks"), "--device", "cpu"]
    command += ["--output_path", str(out), "--log_samples", "--batch_size", str(batch_size)]
    own = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = {}
    for name in TASKS:
        (file,) = out.rglob(f"samples_local_{name}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = [sample["resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
    return found


def flat(found: Any) -> list[str]:
    return [leaf for part in found for leaf in flat(part)] if isinstance(found, list) else [found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in both forms, and the tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    write_model(folder)
    write_tasks(folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """The responses of lm-eval's own backend."""
    arguments = f"pretrained={folder}/theirs,dtype=float32,max_length={LENGTH}"
    return evaluate(folder, THEIRS, "hf", arguments)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["until"] == expected["until"]
    for name in ("choice", "rolling"):
        for mine, other in zip(flat(found[name]), flat(expected[name]), strict=True):
            if other in ("True", "False"):
                assert mine == other
            else:
                assert abs(float(mine) / float(other) - 1) < TOLERANCE


@pytest.mark.feature("Inference: lm-eval evaluates a checkpoint without an export, in any layout")
def test_lm_eval_gives_the_results_of_its_own_backend(
    folder: Path, expected: dict[str, Any]
) -> None:
    ours = f"load={folder}/ours,max_length={LENGTH}"
    assert_equal(evaluate(folder, [sys.executable, *OURS], "megatron", ours), expected)
    two = f"{ours},tensor_model_parallel_size=2"
    assert_equal(evaluate(folder, [*TORCHRUN, *OURS], "megatron", two), expected)


@pytest.mark.feature("Serving: lm-eval's local-completions gives the results of its hf backend")
def test_lm_eval_is_a_client_of_the_server(folder: Path, expected: dict[str, Any]) -> None:
    pytest.importorskip("tenacity", reason="needs lm-eval[api]")
    command = [sys.executable, str(ROOT / "tools" / "run_text_generation_server.py")]
    command += ["--load", str(folder / "ours"), "--device", "cpu", "--port", "0"]
    with started(command) as server:
        # Two tokens more than the backend hf: lm-eval keeps positions for a generated token.
        common = f"model=ours,base_url={server.url}/v1/completions,max_length={LENGTH + 2}"
        local = f"{common},tokenizer_backend=huggingface,tokenizer={folder}/theirs"
        remote = f"{common},num_concurrent=3"  # lm-eval finds the tokenizer of the server
        for arguments, batch_size in ((local, 1), (remote, 4)):
            found = evaluate(folder, THEIRS, "local-completions", arguments, batch_size)
            assert_equal(found, expected)
