"""The programs of examples/post_training/modelopt run on a tiny model, in one process or TP2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from examples.post_training.modelopt.calibrate_gpt import windows
from examples.post_training.modelopt.common import split_paths
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.training.checkpointing.paths import open_checkpoint
from tests.golden.make_sft_losses import TURNS, conversations, write_model
from tests.support.pages import commands_of
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, run_gpt
from tests.support.tokenizer_files import corpus_texts

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

PROGRAMS = ROOT / "examples/post_training/modelopt"
PAGE = ROOT / "docs/post_training_modelopt.md"
# Stands in for torchrun: writes the words that follow it, a line each.
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$@" >words\n'


def run_program(rank: int, world: int, path: str, argv: Sequence[str]) -> tuple[str, str, object]:
    """Run a program on initialized process groups; return stdout, stderr and the exit code."""
    out = io.StringIO()
    err = io.StringIO()
    code: object = 0
    with (
        mock.patch("sys.argv", [path, *argv]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code
    return out.getvalue(), err.getvalue(), code


def run_each(rank: int, world: int, commands: Sequence[Sequence[str]]) -> list[tuple[str, object]]:
    """Run programs that end before they have process groups; return stderr and exit code."""
    return [run_program(0, 1, path, argv)[1:] for path, *argv in commands]


def said(path: Path, argv: Sequence[str], ranks: int = 1) -> str:
    """Return what rank 0 of a program that must succeed printed."""
    found = run_ranks(run_program, ranks, str(path), ["--device", "cpu", *argv])
    out, err, code = found[0]
    assert code == 0, out[-2000:] + err[-2000:]
    return out


def launch(folder: Path, words: Sequence[str]) -> str:
    """Run the program that a command of the page starts in ``folder``; return what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if "bash" not in words:
            return said(ROOT / words[1], words[2:])
        program, argv, ranks = recorded(folder, words)
        return said(program, argv, ranks)


def recorded(folder: Path, words: Sequence[str]) -> tuple[Path, list[str], int]:
    """Return the program that a launcher starts, its command line and the number of ranks."""
    at = words.index("bash")
    variables = dict(word.split("=", 1) for word in words[:at])
    path = f"{folder}:{os.environ['PATH']}"  # the recorder of torchrun
    ended = subprocess.run(
        ["bash", str(ROOT / words[at + 1]), *words[at + 2 :]],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    ranks, program, *argv = (folder / "words").read_text().splitlines()
    trains = any(name in program for name in ("finetune", "prune", "quantize"))
    extra = ["--num-workers", "0"] if trains else []
    return Path(program).resolve(), [*argv, *extra], int(ranks.rpartition("=")[2])


def spread_logits(file: Path) -> None:
    """Replace the embeddings, so that rounding does not decide between two tokens."""
    weights = safetensors.load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name].normal_(generator=generator)
    safetensors.save_file(weights, file, {"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the page names: a model, conversations, prompts, questions."""
    folder = tmp_path_factory.mktemp("modelopt")
    (folder / "Qwen3-0.6B").mkdir()
    write_model(folder / "Qwen3-0.6B")
    spread_logits(folder / "Qwen3-0.6B/model.safetensors")
    (folder / "torchrun").write_text(RECORDER)
    (folder / "torchrun").chmod(0o755)
    prompts = [{"prompt": "the people of the city " * 4}, {"turns": ["Who are you?", "Why?"]}]
    question = {"question": "Sun?", "choices": ["a", "b", "c", "d"], "answer": 2, "subject": "sky"}
    (folder / "mmlu").mkdir()
    for name, rows in {
        "chats.jsonl": [{"messages": chat} for chat in conversations()],
        "prompts.jsonl": prompts,
        "mmlu/test-0.jsonl": [question] * 4,
        "texts.jsonl": [{"text": text} for text in corpus_texts()[:100]],
        "short.jsonl": [{"text": "a short text"}],
    }.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wiki.txt").write_text("\n".join(corpus_texts()[100:110])[:1000])
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """What the commands of the page print, by the name of the launcher; they run in its order."""
    found = {}
    for words in commands_of(PAGE):
        program = next(word for word in words if word.endswith((".sh", ".py")))
        name = Path(program).stem
        found[name] = found.get(name, "") + launch(folder, words)
    return found


@pytest.mark.feature("ModelOpt: convert.sh writes a Hugging Face folder as a checkpoint")
def test_a_converted_model_has_the_weights_of_the_folder(
    folder: Path, printed: dict[str, str]
) -> None:
    assert "wrote the checkpoint ck" in printed["convert"]
    theirs = folder / "Qwen3-0.6B"
    with open_reader(folder / "ck/iter_0000001") as ours, open_reader(theirs) as published:
        for key in published.tensors:
            assert torch.equal(ours.read(key), published.read(key)), key
    copy = folder / "ck/huggingface/config.json"
    assert copy.read_text() == (theirs / "config.json").read_text()


@pytest.mark.feature("ModelOpt: generate.sh answers conversations in any layout")
def test_answers_do_not_depend_on_layout_and_drafts(folder: Path, printed: dict[str, str]) -> None:
    flags = ["--load", str(folder / "ck"), "--osl", "8", "--tensor-model-parallel-size", "2"]
    flags += ["--draft-length", "2", "--draft-topk", "3", "--inference-draft-model", "ngram"]
    flags += ["--finetune-hf-dataset", str(folder / "chats.jsonl"), "--export-te-mcore-model"]
    two = said(PROGRAMS / "generate.py", flags, ranks=2)
    written, _, drafts = two.rstrip().rpartition("\n")
    assert "tokens in a step with drafts (" in drafts
    texts = (printed["generate"].rstrip(), written)
    answers = [text[text.index("{'role'") :].rstrip() for text in texts]
    assert answers[0] == answers[1]
    assert answers[0].count("{'role': 'user'") == sum(len(turns) for turns in TURNS) // 2
    assert "--draft-topk 3 is without effect" in two
    assert "--export-te-mcore-model: without effect" in two


@pytest.mark.feature("ModelOpt: mmlu.sh scores a folder of MMLU, and can require a share")
def test_mmlu_counts_answers(folder: Path, printed: dict[str, str], tmp_path: Path) -> None:
    rows = re.findall(r"^(\w+) +\| \d\.\d{3} \| +\d+/ +(\d+)$", printed["mmlu"], re.MULTILINE)
    assert rows == [("sky", "2"), ("average", "2")]
    (tmp_path / "test").mkdir()
    (tmp_path / "test/deep_sky_test.csv").write_text('"Sun, moon?",a,b,c,d,C\n')
    flags = ["--load", str(folder / "ck"), "--mmlu-dataset", str(tmp_path), "--lower-bound", "1"]
    ((out, _, code),) = run_ranks(run_program, 1, str(PROGRAMS / "mmlu.py"), flags)
    assert "deep_sky " in out
    assert str(code).startswith("--lower-bound 1.0: the average")


@pytest.mark.feature("ModelOpt: validate.sh reports the acceptance rate of drafts")
def test_validate_reports_accepted_drafts_and_compares_texts(
    folder: Path, printed: dict[str, str], tmp_path: Path
) -> None:
    rate, tokens, steps, accepted = re.findall(
        r"rate: ([\d.]+) tokens in a step \((\d+) tokens, (\d+) steps, (\d+) of",
        printed["validate"],
    )[0]
    assert int(tokens) == 40 == int(steps) + int(accepted)
    assert float(rate) == pytest.approx(40 / int(steps), abs=1e-3)
    flags = ["--load", str(folder / "ck"), "--prompts-path", str(folder / "prompts.jsonl")]
    flags += ["--osl", "20", "--steps", "0", "--ground-truth-path"]
    out = said(PROGRAMS / "validate.py", [*flags, str(folder / "truth.pt")])
    assert "all 2 answers equal the ground truth" in out
    torch.save([torch.tensor([1]), torch.tensor([2])], tmp_path / "wrong.pt")
    words = [*flags, str(tmp_path / "wrong.pt")]
    ((_, err, code),) = run_ranks(run_program, 1, str(PROGRAMS / "validate.py"), words)
    assert "the answers to prompts 1, 2 differ" in err
    assert code == 65


@pytest.mark.feature("ModelOpt: finetune.sh tunes a checkpoint on conversations")
def test_finetuning_lowers_the_loss(folder: Path, printed: dict[str, str]) -> None:
    with (
        open_reader(folder / "tuned/iter_0000004") as tuned,
        open_reader(folder / "ck/iter_0000001") as before,
    ):
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        assert not torch.equal(tuned.read(name), before.read(name))


@pytest.mark.feature("ModelOpt: prune.sh prunes a Hugging Face folder")
def test_pruning_takes_its_sizes_from_variables(folder: Path, printed: dict[str, str]) -> None:
    with open_reader(folder / "small/release") as reader:
        args = reader.common()["args"]
    assert (args["num_layers"], args["hidden_size"]) == (1, 32)


@pytest.mark.feature("ModelOpt: quantize.sh calibrates a Hugging Face folder and tries the result")
def test_quantizing_writes_scales_and_continues_prompts(
    folder: Path, printed: dict[str, str]
) -> None:
    assert "'Born in California, Soyer trained as a' -> '" in printed["quantize"]
    with open_reader(folder / "quantized/release") as reader:
        assert reader.common()["args"]["export_quant_cfg"] == "fp8"
        scale = "decoder.layers.0.mlp.linear_fc1.quantizer.{}_scale"
        assert all(reader.read(scale.format(of)) > 0 for of in ("weight", "input"))


def test_a_text_that_is_not_the_reference_is_an_error(
    folder: Path, printed: dict[str, str], tmp_path: Path
) -> None:
    flags = ["--load", str(folder / "ck"), "--save", str(tmp_path / "int8"), "--mock-data"]
    flags += ["--export-quant-cfg", "int8", "--calib-size", "1", "--num-workers", "0"]
    flags += ["--device", "cpu", "--prompts", "the", "--references", "no such text"]
    ((out, _, code),) = run_ranks(run_program, 1, str(PROGRAMS / "quantize.py"), flags)
    assert "'the' -> '" in out
    assert str(code).startswith("--references: these are not the texts")
    assert "no such text" in str(code)


def test_calibration_can_use_experts_without_tokens(tmp_path: Path) -> None:
    experts = ["--num-experts", "32", "--moe-router-topk", "1", "--moe-ffn-hidden-size", "16"]
    short = ["--train-iters", "1", "--eval-iters", "0", "--save", str(tmp_path / "moe")]
    run_gpt(tmp_path, *experts, "--moe-router-pre-softmax", *short)
    flags = ["--load", str(tmp_path / "moe"), "--save", str(tmp_path / "fp8"), "--device", "cpu"]
    flags += ["--export-quant-cfg", "fp8", "--calib-size", "1", "--mock-data", "--prompts", ""]
    words = [str(PROGRAMS / "quantize.py"), [*flags, "--num-workers", "0"]]
    ((_, err, code),) = run_ranks(run_program, 1, *words)
    assert code == 2
    assert "the calibration samples have no token, only zeros or values that are not" in err
    own = ["--force-all-expert-routing", "--prompts", "the", "--skip-generate"]
    assert " -> " not in said(PROGRAMS / "quantize.py", [*words[1], *own])
    with open_reader(tmp_path / "fp8/release") as reader:
        assert reader.common()["args"]["moe_router_topk"] == 1
        scales = [key for key in reader.tensors if key.endswith("quantizer.input_scale")]
        assert len(scales) > 2 * 32
        assert all(reader.read(key).min() > 0 for key in scales)


@pytest.mark.feature("ModelOpt: export.sh writes a checkpoint as a Hugging Face folder")
def test_a_quantized_checkpoint_is_exported_in_few_bits(
    folder: Path, printed: dict[str, str]
) -> None:
    config = json.loads((folder / "exported/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    settings = json.loads((folder / "exported/hf_quant_config.json").read_text())
    assert settings["quantization"]["quant_algo"] == "FP8"
    weights = safetensors.load_file(folder / "exported/model.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_an_exported_model_has_the_weights_of_the_folder(
    folder: Path, printed: dict[str, str], tmp_path: Path
) -> None:
    flags = ["--load", str(folder / "ck"), "--export-dir", str(tmp_path / "hf")]
    said(PROGRAMS / "export.py", flags)
    theirs = safetensors.load_file(folder / "Qwen3-0.6B/model.safetensors")
    ours = safetensors.load_file(tmp_path / "hf/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert (tmp_path / "hf/tokenizer.json").exists()


@pytest.mark.feature("ModelOpt: convert_model.py --extra-model-path adds trained draft heads")
def test_heads_of_a_folder_are_added_to_a_model(folder: Path, tmp_path: Path) -> None:
    load = ["--load", str(folder / "Qwen3-0.6B"), "--save"]
    heads = ["--export-num-medusa-heads", "2"]
    said(PROGRAMS / "convert_model.py", [*load, str(tmp_path / "first"), *heads])
    flags = ["--load", str(tmp_path / "first"), "--export-dir", str(tmp_path / "hf")]
    said(PROGRAMS / "export.py", flags)
    flags = ["--extra-model-path", str(tmp_path / "hf/draft")]
    said(PROGRAMS / "convert_model.py", [*load, str(tmp_path / "again"), *flags])
    tensors = []
    for name in ("first", "again"):
        with open_reader(open_checkpoint(tmp_path / name, None).folder) as reader:
            drafts = [key for key in reader.tensors if key.startswith("draft.")]
            tensors.append({key: reader.read(key) for key in drafts})
    assert tensors[0]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[1][key], value) for key, value in tensors[0].items())


def perplexity_of(text: str) -> float:
    return float(text.rpartition("perplexity ")[2].split()[0])


@pytest.mark.feature("ModelOpt: calibrate_gpt.py measures the perplexity of texts")
def test_perplexity_is_that_of_transformers(
    folder: Path, printed: dict[str, str], tmp_path: Path
) -> None:
    text = (folder / "wiki.txt").read_text()[:150]
    (tmp_path / "text.txt").write_text(text)
    flags = ["--task", "WIKITEXT103", "--valid-data", str(tmp_path / "text.txt"), "--load"]
    found = said(ROOT / "tasks/quantize/calibrate_gpt.py", [*flags, str(folder / "Qwen3-0.6B")])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "Qwen3-0.6B")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "Qwen3-0.6B")
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert perplexity_of(found) == pytest.approx(loss.exp().item(), rel=1e-3)
    assert perplexity_of(printed["calibrate_gpt"]) > 1  # of the quantized model, in windows


@pytest.mark.parametrize("stride", [1, 4, 9])
def test_windows_score_each_token_once_after_enough_others(stride: int) -> None:
    tokens = list(range(23))
    scored = []
    for window, count in windows(tokens, 9, stride):
        assert len(window) <= 10
        assert len(window) - count >= min(window[-count], 10 - stride)
        scored += window[-count:]
    assert scored == tokens[1:]


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (("state.json", "data-0.arrow"), "train", ("",)),
        (("train/state.json", "test/state.json", "dataset_dict.json"), "test", ("test",)),
        (("test.jsonl", "train.jsonl"), "test", ("test.jsonl",)),
        (
            ("data/train-0-of-2.parquet", "data/train-1-of-2.parquet", "README.md"),
            "train",
            ("data/train-0-of-2.parquet", "data/train-1-of-2.parquet"),
        ),
    ],
)
def test_a_split_is_found_in_the_forms_of_datasets_and_of_the_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: Sequence[str],
    split: str,
    found: Sequence[str],
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wanted = [str(tmp_path / name) for name in found]
    assert split_paths(str(tmp_path), split, "--finetune-hf-dataset") == wanted
    asked = []

    def download(name: str, **options: object) -> str:
        asked.append((name, options["repo_type"]))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert split_paths("org/chats", split, "--finetune-hf-dataset") == wanted
    assert asked == [("org/chats", "dataset")]


# Program, flags, and the beginning of the error message; {hf} is a Hugging Face folder.
REFUSED = [
    ("convert_model", "--save x", "--load (or --pretrained-model-path) is missing"),
    ("convert_model", "--load gone --save x", "--load gone: no such folder"),
    ("convert_model", "--load {hf} --pretrained-model-path {hf}", "--load {hf} and --pretrained"),
    ("convert_model", "--load {hf}", "--save is missing"),
    (
        "convert_model",
        "--load {hf} --save x --extra-model-path {hf}",
        "--extra-model-path {hf}: it holds no draft heads",
    ),
    ("generate", "", "--load is missing"),
    ("generate", "--load {hf} --finetune-hf-dataset {chats} --percentage 2", "--percentage 2.0:"),
    ("generate", "--load {hf} --finetune-hf-dataset {hf} --finetune-data-split x", "no split x"),
    ("mmlu", "--load {hf} --mmlu-dataset /gone", "--mmlu-dataset /gone: no such file"),
    ("finetune", "--load {hf}", "--finetune-hf-dataset is missing"),
    ("prune", "--load {hf} --prune-export-config 3", "--prune-export-config 3: give a JSON"),
    (
        "quantize",
        "--load {hf} --save x --prompts a|b --references c",
        "--references c: there are 1",
    ),
    (
        "quantize",
        "--load {hf} --save x --export-quant-cfg int3",
        "--export-quant-cfg int3: not one of int8_sq",
    ),
    ("quantize", "--load {hf} --export-quant-cfg fp8 --device cpu", "--save is required"),
    ("quantize", "--load {hf} --save x --device cpu", "--export-quant-cfg is required: one of"),
    ("export", "--load {hf}", "--export-dir is missing"),
    ("export", "--load gone --export-dir x", "--load gone: no such folder"),
    ("generate", "--load {hf} --device cpu --draft-length 1", "no layers for multi-token"),
]


def test_bad_input_is_one_message(folder: Path) -> None:
    names = {"hf": folder / "Qwen3-0.6B", "chats": folder / "chats.jsonl"}
    commands = [
        [str(PROGRAMS / f"{name}.py"), *flags.format(**names).split()] for name, flags, _ in REFUSED
    ]
    (found,) = run_ranks(run_each, 1, commands)
    for (_, _, message), (err, code) in zip(REFUSED, found, strict=True):
        assert message.format(**names) in err
        assert code
        assert "Traceback" not in err
