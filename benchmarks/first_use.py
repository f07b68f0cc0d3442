"""Install each application as a new user would; count seconds and settings to its first results.

    python -m benchmarks.first_use --work /tmp/first_use [--of ours trl] [--keep-environments]

Every application gets an environment of its own (pip's cache stays as it is), the tiny Qwen3 of the
recipes as a Hugging Face folder, and the same files: a text, conversations, preferences.  A result
counts when `transformers` of this environment loads the folder that was written, or when the server
answers OpenAI's chat request.  Settings are flags and lines of files that the user must write;
seconds measure the complete commands.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
STEPS = 10
LENGTH = 128
TIME_LIMIT_S = 900
PORT = 8137


@dataclass(frozen=True)
class Task:
    """What a user does for one result.

    ``commands`` run one after the other in the folder of the application; ``files`` are written
    before.  ``result`` is a folder of transformers; a task without one starts a server.
    """

    commands: tuple[str, ...]
    result: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> int:
        flags = sum(len(re.findall(r"(?:^| )--[\w.-]+", command)) for command in self.commands)
        lines = (line for text in self.files.values() for line in text.splitlines())
        return flags + sum(bool(re.search(r"\w", line)) for line in lines)


@dataclass(frozen=True)
class Application:
    packages: str
    tasks: dict[str, Task]
    after_install: str = ""  # what this machine needs, no work of the user


OURS = Application(
    f"'{{wheel}}[hf,serve]' {TORCH}",
    {
        "text": Task(
            (
                "megatron-preprocess --input ../text.jsonl --output-prefix text --append-eod "
                "--tokenizer-type HuggingFaceTokenizer --tokenizer-model ../model",
                f"megatron-train gpt --load ../model --data-path text_text_document "
                f"--seq-length {LENGTH} --micro-batch-size 8 --lr 1e-5 --train-iters {STEPS} "
                "--save-hf of_text",
            ),
            "of_text",
        ),
        "conversations": Task(
            (
                f"megatron-train sft --load ../model --data-path ../chats.jsonl "
                f"--train-iters {STEPS} --save-hf of_chats",
            ),
            "of_chats",
        ),
        "preferences": Task(
            (
                f"megatron-train dpo --load ../model --data-path ../pairs.jsonl "
                f"--train-iters {STEPS} --save-hf of_pairs",
            ),
            "of_pairs",
        ),
        "server": Task((f"megatron-serve --load ../model --port {PORT}",)),
    },
)


def _trl(objective: str, data: str) -> Task:
    command = (
        f"trl {objective} --model_name_or_path ../model --dataset_name ./{data} "
        f"--output_dir of_{data} --max_steps {STEPS} --max_length {LENGTH} "
        "--use_cpu --report_to none"
    )
    return Task((command,), f"of_{data}")


TRL = Application(
    f"trl {TORCH}",
    {
        "text": _trl("sft", "text"),
        "conversations": _trl("sft", "chats"),
        "preferences": _trl("dpo", "pairs"),
    },
)
_OF_OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
_DATASETS = {
    "text": {"file_name": "text.jsonl", "columns": {"prompt": "text"}},
    "chats": {
        "file_name": "chats.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": _OF_OPENAI,
    },
    "pairs": {
        "file_name": "pairs.jsonl",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "prompt", "chosen": "chosen", "rejected": "rejected"},
        "tags": _OF_OPENAI,
    },
}


def _factory(stage: str, dataset: str, output: str) -> Task:
    text = f"""model_name_or_path: ../model
stage: {stage}
do_train: true
finetuning_type: full
dataset_dir: .
dataset: {dataset}
template: qwen3
cutoff_len: {LENGTH}
max_steps: {STEPS}
output_dir: {output}
"""
    return Task(
        (f"llamafactory-cli train {stage}.yaml",),
        output,
        {
            f"{stage}.yaml": text,
            "dataset_info.json": json.dumps({dataset: _DATASETS[dataset]}, indent=1),
        },
    )


LLAMA_FACTORY = Application(
    f"llamafactory {TORCH}",
    {
        "text": _factory("pt", "text", "of_text"),
        "conversations": _factory("sft", "chats", "of_chats"),
        "preferences": _factory("dpo", "pairs", "of_pairs"),
        "server": Task(
            (
                "llamafactory-cli api --model_name_or_path ../model --template qwen3 "
                "--infer_backend huggingface",
            )
        ),
    },
    # Beside a CPU build of torch, torchvision and torchaudio for CUDA cannot load their libraries.
    "cd env/lib/python3*/site-packages && rm -r torchaudio && touch torchaudio.py && "
    "sed -i 's/^@torch.library.register_fake(/@(lambda name: lambda function: function)(/' "
    "torchvision/_meta_registrations.py",
)
APPLICATIONS = {"ours": OURS, "trl": TRL, "llamafactory": LLAMA_FACTORY}


def write_inputs(folder: Path) -> None:
    """Write the model, conversations and preferences of the recipes, and a text."""
    inputs = folder / "inputs"
    if not inputs.exists():
        code = "import megatron_commands; megatron_commands.train()"
        command = [sys.executable, "-c", code, "recipes", str(inputs)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (folder / "model").symlink_to(inputs / "tiny")
    for name in ("chats", "pairs"):
        rows = (inputs / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
        (folder / f"{name}.jsonl").write_text(rows * 20, encoding="utf-8")
    pages = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    texts = [json.dumps({"text": text}) for text in pages.split("\n\n")]
    (folder / "text.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")


class Environment:
    """A virtual environment in ``folder`` and the commands that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("text", "chats", "pairs"):
            (folder / name).mkdir(exist_ok=True)  # TRL reads folders
            for place in (folder, folder / name):
                with contextlib.suppress(FileExistsError):
                    (place / f"{name}.jsonl").symlink_to(folder.parent / f"{name}.jsonl")
        path = f"{folder / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
        self.variables = {k: v for k, v in os.environ.items() if k not in dropped}
        self.variables |= {"PATH": path, "HF_HUB_OFFLINE": "1", "API_PORT": str(PORT)}

    def install(self, packages: str) -> float:
        """Return the seconds of a new environment with ``packages``."""
        began_s = time.monotonic()
        self.run(f"{sys.executable} -m venv env")
        self.run(f"python -m pip install --quiet {packages}")
        return time.monotonic() - began_s

    def run(self, command: str) -> None:
        """Raise CalledProcessError if the command fails; its output is in the log."""
        with self.log.open("a") as log:
            print(f"$ {command}", file=log, flush=True)
            subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIME_LIMIT_S,
                check=True,
            )

    @contextlib.contextmanager
    def started(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        with self.log.open("a") as log:
            print(f"$ {command}", file=log, flush=True)
            process = subprocess.Popen(
                shlex.split(command),
                cwd=self.folder,
                env=self.variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                executable=str(self.folder / "env" / "bin" / shlex.split(command)[0]),
            )
            try:
                yield process
            finally:
                process.terminate()
                process.wait(timeout=60)


def seconds_of(task: Task, environment: Environment) -> float:
    """Do the task; return its seconds.  Raise if it gives no result."""
    for name, text in task.files.items():
        (environment.folder / name).write_text(text, encoding="utf-8")
    began_s = time.monotonic()
    if not task.result:
        with environment.started(task.commands[-1]) as process:
            _wait_for_answer(process)
            return time.monotonic() - began_s
    for command in task.commands:
        environment.run(command)
    taken_s = time.monotonic() - began_s
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(environment.folder / task.result)
    AutoModelForCausalLM.from_pretrained(environment.folder / task.result)
    return taken_s


def _wait_for_answer(process: subprocess.Popen[bytes]) -> None:
    address = f"http://127.0.0.1:{PORT}/v1"
    ends_s = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < ends_s:
        try:
            with urllib.request.urlopen(f"{address}/models", timeout=TIME_LIMIT_S) as answer:
                model = json.load(answer)["data"][0]["id"]
            turns = [{"role": "user", "content": "Hi"}]
            body = {"model": model, "messages": turns, "max_tokens": 8}
            request = urllib.request.Request(
                f"{address}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=TIME_LIMIT_S) as answer:
                assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
                return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}") from None
            time.sleep(0.2)
    raise RuntimeError("the server did not answer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for everything")
    parser.add_argument("--of", nargs="+", choices=APPLICATIONS, default=list(APPLICATIONS))
    parser.add_argument("--keep-environments", action="store_true", help="do not install again")
    asked = parser.parse_args()
    work = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_inputs(work)
    print("| application | installed (s) | result | settings | commands | seconds |")
    print("|---|---|---|---|---|---|")
    for name in asked.of:
        application = APPLICATIONS[name]
        environment = Environment(work / name)
        installed = "kept"
        if not (asked.keep_environments and (environment.folder / "env").exists()):
            packages = application.packages
            if "{wheel}" in packages:
                packages = packages.format(wheel=_wheel(work))
            installed = f"{environment.install(packages):.0f}"
            if application.after_install:
                environment.run(application.after_install)
        for kind, task in application.tasks.items():
            try:
                seconds = f"{seconds_of(task, environment):.1f}"
            except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
                seconds = f"failed: {error}"[:200].replace("\n", " ")
            row = (name, installed, kind, task.settings, len(task.commands), seconds)
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


def _wheel(work: Path) -> Path:
    """Build this project's wheel, as a release has it; the time is not the user's."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(work), str(ROOT)],
        check=True,
    )
    return next(work.glob("megatron_train-*.whl"))


if __name__ == "__main__":
    main()
