"""The data tools run where torch cannot be imported, and start fast without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tokenizer_files import CORPUS, SPM_MODEL

ROOT = Path(__file__).parents[3]
TOOLS = (
    "preprocess_data",
    "preprocess_data_nmt",
    "merge_datasets",
    "train_tokenizer",
    "verify_data",
)
BLOCKED = """
import runpy, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformer_engine", "transformers"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_blocked(tool, *arguments):
    command = [sys.executable, "-c", BLOCKED, str(ROOT / "tools" / f"{tool}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("tool", TOOLS)
def test_help_needs_no_torch(tool):
    assert "usage: " in run_blocked(tool, "--help").stdout


def test_a_tokenizer_is_learned_and_data_is_written_and_merged_without_torch(tmp_path):
    pytest.importorskip("tokenizers")
    source = ["--input", str(CORPUS)]
    tok = tmp_path / "tok"
    run_blocked("train_tokenizer", *source, "--output-dir", str(tok), "--vocab-size", "400")
    (tmp_path / "parts").mkdir()
    for name in ("a", "b"):
        run_blocked(
            "preprocess_data",
            *(*source, "--output-prefix", str(tmp_path / "parts" / name), "--workers", "1"),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tok)),
            "--append-eod",
        )
    merged = str(tmp_path / "all")
    run_blocked("merge_datasets", "--input", str(tmp_path / "parts"), "--output-prefix", merged)
    part = tmp_path / "parts" / "a_text_document.bin"
    assert Path(merged + ".bin").read_bytes() == part.read_bytes() * 2
    assert Path(merged + ".tokenizer.json").exists()


def test_an_error_of_the_user_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", "/none"]
    command += ["--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    command += ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model"]
    done = subprocess.run([*command, str(SPM_MODEL)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --input /none: no such file")
    assert "Traceback" not in done.stderr


def test_the_front_end_of_a_server_needs_no_torch():
    pytest.importorskip("uvicorn")
    program = BLOCKED.rpartition("sys.argv = ")[0]
    program += f"sys.path.insert(0, {str(ROOT)!r})\nimport megatron.inference.server.front_end"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
