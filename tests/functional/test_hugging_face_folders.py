"""Runs that start from a Hugging Face folder and end with one, without a conversion."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, DataError
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.inference.generation import GenerationLayout
from megatron.training.arguments.input_files import take_splits_of_dataset
from megatron.training.arguments.parser import parse_args
from megatron.training.checkpointing.model_folder_args import (
    local_folder,
    start_from_model_folder,
)
from megatron.training.checkpointing.paths import read_content, resolve_folder
from megatron_commands import command_line
from tests.golden.make_sft_losses import conversations, write_model
from tests.repo.source import ROOT
from tests.support import tolerances
from tests.support.generation_ranks import score
from tests.support.pages import commands_of
from tests.support.ranks import run_ranks
from tests.support.runs import defaults_of, losses, refusal, run_gpt
from tools.checkpoint import convert

models = pytest.importorskip("tests.support.hugging_face_models", reason="needs transformers")

TRAINING = (
    "--device cpu --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 2 --mock-data --log-interval 1 --eval-interval 1000 --eval-iters 1 "
    "--num-workers 0 --no-create-attention-mask-in-dataloader"
).split()
STILL = (
    "--lr 0 --min-lr 0 --weight-decay 0 --moe-token-dispatcher-type alltoall "
    "--moe-router-bias-update-rate 0"
).split()
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
# Case of the models -> more flags of several ranks
CASES = {
    "llama": TP2_PP2,
    "qwen3": f"{TP2_PP2} --ckpt-fully-parallel-load",
    "qwen3 moe": f"{TP2_PP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "deepseek v3": f"{TP2_PP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "llama 3, tied": "--use-distributed-optimizer --tensor-model-parallel-size 2",
    "gpt2": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
}
LAYOUTS = {"1 rank": (1, GenerationLayout()), "TP2 PP2": (4, GenerationLayout(pipeline=2))}
TOLERANCE = 1e-5  # of log-probabilities in fp32
PROMPTS = models.prompts(32)


def write_case(folder: Path, case: str) -> None:
    """Write a model of two layers."""
    models.write(folder, case, **{"n_layer" if case == "gpt2" else "num_hidden_layers": 2})


def their_scores(folder: Path) -> Tensor:
    """Return the log-probs of `score` by `transformers`, which must not complain of the folder."""
    logits, said = models.logits_of(folder, PROMPTS)
    assert said == ""
    return logits[:, :-1].log_softmax(-1).gather(-1, PROMPTS[:, 1:, None]).squeeze(-1)


def assert_same_scores(ours: Path, theirs: Tensor, layout: str = "1 rank") -> None:
    ranks, sizes = LAYOUTS[layout]
    found, *_ = run_ranks(score, ranks, str(ours), PROMPTS.tolist(), sizes)
    torch.testing.assert_close(torch.tensor(found), theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.feature(
    "Checkpoints: --load takes a Hugging Face folder in any layout; the logits are transformers'"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen3 moe"])
def test_a_folder_generates_with_the_logits_of_transformers(
    case: str, layout: str, tmp_path: Path
) -> None:
    write_case(tmp_path, case)
    assert_same_scores(tmp_path, their_scores(tmp_path), layout)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_goes_through_a_layout_bit_for_bit(case: str, tmp_path: Path) -> None:
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    write_case(theirs, case)
    base = [*TRAINING, "--load", str(theirs), *STILL]
    alone = run_gpt(tmp_path / "one", base=base)
    flags = [*CASES[case].split(), "--save-hf", str(back)]
    ranks = 2 if case == "gpt2" else 4
    found = run_gpt(tmp_path / "several", *flags, base=base, world_size=ranks)
    torch.testing.assert_close(
        torch.tensor(losses(found)), torch.tensor(losses(alone)), **tolerances.LAYOUT_LOSS
    )
    models.assert_same_weights(back, theirs)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (theirs / "config.json").read_text()
    )


@pytest.mark.feature("Checkpoints: --save-hf writes the trained model for transformers")
def test_a_trained_model_is_the_same_here_and_at_hugging_face(tmp_path: Path) -> None:
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    write_case(theirs, "qwen3")
    flags = f"{TP2_PP2} --load {theirs} --save {ours} --save-hf {back}".split()
    run_gpt(tmp_path, *flags, base=TRAINING, world_size=4)
    trained = their_scores(back)
    assert not torch.allclose(trained, their_scores(theirs), atol=1e-2)
    assert_same_scores(ours, trained)
    assert_same_scores(back, trained)
    assert not list(tmp_path.glob("back.tmp-*"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tokenizer and chat template, and conversations in ``chats.jsonl``."""
    folder = tmp_path_factory.mktemp("chat")
    write_model(folder / "model")
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<unk>"}))
    lines = [json.dumps({"messages": messages}) for messages in conversations() * 4]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder


def tune(folder: Path, chat: Path, *flags: str, **options: Any) -> list[dict[str, Any]]:
    """Fine-tune with model, data and the given flags alone."""
    words = f"--load {chat / 'model'} --data-path {chat / 'chats.jsonl'} --device cpu".split()
    words += ["--data-cache-path", str(folder / "cache"), "--num-workers", "0"]
    return run_gpt(folder, *words, *flags, base=(), **options)


def run_line(words: list[str], chat: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a command line of a page on the tiny model, with outputs in ``folder``."""
    places = {
        "--load": chat / "model",
        "--data-path": folder / "pairs.jsonl" if "pairs.jsonl" in words else chat / "chats.jsonl",
        "--save-hf": folder / "tuned",
    }
    line = command_line(words[1:])  # the program is the first word
    flags = [str(places.get(before, word)) for before, word in itertools.pairwise(line)]
    more = f"--device cpu --num-workers 0 --data-cache-path {folder / 'cache'}".split()
    return run_gpt(folder, base=[*flags, *more])


@pytest.mark.feature("Fine-tuning: one line with a Hugging Face model, data and an output folder")
def test_one_line_fine_tunes(chat: Path, tmp_path: Path) -> None:
    line = commands_of(ROOT / "docs" / "sft.md")[0]
    assert line in commands_of(ROOT / "README.md")
    found = run_line(line, chat, tmp_path)
    assert len(losses(found)) == 4  # 3 epochs of 10 rows, 8 in a step
    names = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    logits, said = models.logits_of(tmp_path / "tuned", PROMPTS)
    before, _ = models.logits_of(chat / "model", PROMPTS)
    assert said == ""
    assert not torch.equal(logits, before)
    again = tune(tmp_path / "again", chat, "--sft", world_size=2)
    assert losses(again) == pytest.approx(losses(found), rel=1e-5)


def overfit(folder: Path, chat: Path, *flags: str, **options: Any) -> list[dict[str, Any]]:
    """Fine-tune until the loss of other answers rises: step 6 is the best one, 8 and 10 follow."""
    rows = [json.loads(line) for line in (chat / "chats.jsonl").open()][:6]
    for message in (message for row in rows for message in row["messages"]):
        if message["role"] == "assistant":
            message["content"] = message["content"][::-1]
    (folder / "valid.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = f"--load {chat / 'model'} --device cpu --num-workers 0 --sft --train-iters 20 "
    words += f"--lr 2e-2 --lr-decay-style constant --train-data-path {chat / 'chats.jsonl'} "
    words += f"--valid-data-path {folder / 'valid.jsonl'} --data-cache-path {folder / 'cache'} "
    words += f"--eval-interval 2 --save {folder / 'ours'} --save-interval 3 --save-best "
    words += "--keep-last-checkpoints 1 --early-stopping-patience 2"
    return run_gpt(folder, *words.split(), *flags, base=(), **options)


@pytest.mark.feature("Fine-tuning: --save-best keeps the best checkpoint, and --save-hf writes it")
def test_training_ends_with_the_weights_of_the_best_evaluation(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed, and continues in another layout, ends as one that is not."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    for folder in (whole, other):
        folder.mkdir()
    hub = ["--save-hf-interval", "3", "--save-hf"]
    found = overfit(whole, chat, *hub, str(whole / "hf"))
    monkeypatch.setenv("FAULTS", "save.after_rename:kill:step9")
    with pytest.raises(AssertionError, match="SIGKILL"):
        overfit(other, chat, *hub, str(other / "hf"))
    monkeypatch.delenv("FAULTS")
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    resumed = overfit(other, chat, *hub, str(other / "hf"), *layout, world_size=4)
    assert [row["iteration"] for row in resumed if "lm loss" in row][-1] == 10
    for folder, rows in ((whole, found), (other, resumed)):
        kept = {path.name for path in (folder / "ours").glob("iter_*")}
        assert kept == {"iter_0000006", "iter_0000010"}
        counters = read_content(folder / "ours" / "iter_0000010").common["counters"]
        assert (counters["best_iteration"], counters["evaluations_since_best"]) == (6, 2)
        evaluated = [row["lm loss validation"] for row in rows if "lm loss validation" in row]
        assert evaluated[-1] == pytest.approx(counters["best_metric"], rel=1e-4)
        models.assert_same_weights(folder / "hf-step-6", folder / "hf")
        names = {path.name for path in folder.glob("hf*")}
        # The killed run had saved step 9, and had not written its folder.
        assert names == {"hf", "hf-step-6"} | ({"hf-step-9"} if folder == whole else set())
    their_scores(whole / "hf-step-9")
    assert_same_scores(other / "ours" / "iter_0000006", their_scores(other / "hf"))
    best = other / "ours" / "iter_0000006"
    best.rename(tmp_path / "gone")
    again = overfit(other, chat)  # which adds to the rows, and ends without the best step
    assert losses(again) == losses(resumed), "the run had ended"
    written = (other / "hf" / "model.safetensors").stat()
    overfit(other, chat, "--save-hf", str(other / "hf"))  # as a scheduler may start it again
    assert (other / "hf" / "model.safetensors").stat() == written


@pytest.mark.skipif(models.peft is None, reason="needs peft")
@pytest.mark.parametrize("merges", [False, True])
def test_adapters_become_a_folder_of_peft_or_are_merged(
    merges: bool, chat: Path, tmp_path: Path
) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    flags = f"--sft --lora-rank 4 --lr 1e-2 --save {ours} --save-hf {back}".split()
    flags += ["--save-hf-merged"] if merges else []
    flags += "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    tune(tmp_path, chat, *flags, world_size=4)
    if merges:
        theirs = their_scores(back)
    else:
        assert {path.name for path in back.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        model = models.AUTO.from_pretrained(chat / "model", attn_implementation="eager")
        with torch.no_grad():
            logits = models.peft.PeftModel.from_pretrained(model, back).eval()(PROMPTS).logits
        theirs = logits[:, :-1].log_softmax(-1).gather(-1, PROMPTS[:, 1:, None]).squeeze(-1)
    assert_same_scores(ours, theirs)


@pytest.mark.parametrize("number", [0, 1])
def test_one_line_trains_on_preferences(number: int, chat: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": m[:1], "chosen": m[1:2], "rejected": [{"role": "assistant", "content": "No."}]}
        for m in conversations() * 4
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = commands_of(ROOT / "docs" / "preference.md")[number]
    found = run_line(line, chat, tmp_path)
    assert any("loss" in name for name in found[0])
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    kind = "SequenceClassification" if number else "CausalLM"
    assert config["architectures"] == [f"LlamaFor{kind}"]
    if number:  # the last pair is the one for evaluation
        scores = [found[-1][f"reward of {name} validation"] for name in ("chosen", "rejected")]
        assert scores == pytest.approx(their_rewards(tmp_path / "tuned", rows[-1]), abs=1e-5)


def their_rewards(folder: Path, row: dict[str, Any]) -> list[float]:
    """Return the scores of both answers by the classifier of `transformers` in ``folder``."""
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(folder)
    model = models.transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [
        tokenizer.apply_chat_template(row["prompt"] + row[name], tokenize=False)
        for name in ("chosen", "rejected")
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        return [float(score) for score in model(**batch).logits]


@pytest.mark.parametrize(
    ("flags", "ranks", "batch", "rate"),
    [
        ("--sft", 1, 8, 1e-5),
        ("--sft --lora-rank 4 --micro-batch-size 3", 2, 12, 1e-4),
        ("--dpo-beta 0.1 --tensor-model-parallel-size 2", 64, 32, 1e-6),
        ("--reward-model --check-only --check-world-size 32", 1, 32, 1e-5),
        ("--sft --virtual-ranks 4 --lr 1e-2 --global-batch-size 4", 1, 4, 1e-2),
    ],
)
def test_defaults_fit_the_ranks_and_the_objective(
    flags: str, ranks: int, batch: int, rate: float, chat: Path
) -> None:
    words = f"--device cpu --load {chat / 'model'} --data-path data.jsonl {flags}".split()
    args = parse_args(argv=words, args_defaults=defaults_of("pretrain_gpt.py"))
    start_from_model_folder(args, ranks, trains=True)
    assert (args.global_batch_size, args.lr) == (batch, rate)
    assert (args.seq_length, args.epochs) == (128, 3.0 if "--sft" in flags else 1.0)
    assert args.tokenizer_type == "HuggingFaceTokenizer"


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ("train", {"data_path": "train"}),
        ("train test", {"train_data_path": "train", "valid_data_path": "test"}),
        (
            "train test validation",
            {
                "train_data_path": "train",
                "valid_data_path": "validation",
                "test_data_path": "test",
            },
        ),
    ],
)
def test_the_splits_of_a_saved_dataset_are_used(
    splits: str, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "dataset_dict.json").touch()
    for name in splits.split():
        (tmp_path / name).mkdir()
    args = parse_args(argv=["--sft", "--data-path", str(tmp_path)])
    take_splits_of_dataset(args)
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    found = {name: vars(args)[name] for name in names if vars(args)[name]}
    assert found == {name: [str(tmp_path / split)] for name, split in expected.items()}
    shutil.rmtree(tmp_path / "train")
    args.data_path = [str(tmp_path)]
    with pytest.raises(DataError, match="is a DatasetDict without a split train"):
        take_splits_of_dataset(args)


def test_a_saved_dataset_of_several_splits_trains(chat: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.load_dataset(
        "json", data_files=str(chat / "chats.jsonl"), cache_dir=str(tmp_path / "datasets")
    )
    data["train"].train_test_split(0.25, seed=1).save_to_disk(str(tmp_path / "chats"))
    words = f"--load {chat / 'model'} --data-path {tmp_path / 'chats'} --sft --device cpu"
    found = run_gpt(tmp_path, *words.split(), "--num-workers", "0", base=())
    assert len(losses(found)) > 1
    assert "lm loss validation" in found[-1]


def test_a_folder_is_a_teacher(chat: Path, tmp_path: Path) -> None:
    teacher = ["--export-kd-teacher-load", str(chat / "model")]
    found = tune(tmp_path, chat, "--sft", *teacher, "--train-iters", "1")
    assert any("loss" in name for name in found[0])


def refused(folder: Path, chat: Path, flags: str) -> str:
    """Return the error of a run that starts from ``folder``."""
    data = f"--device cpu --data-path {chat / 'chats.jsonl'} --data-cache-path {folder / 'cache'}"
    words = [*data.split(), "--load", str(folder), *flags.split()]
    (said,) = run_ranks(refusal, 1, words)
    assert isinstance(said, str)
    return said


def test_flags_that_contradict_the_folder_are_listed_together(chat: Path) -> None:
    flags = (
        "--sft --num-layers 4 --hidden-size 64 --normalization LayerNorm --norm-epsilon 1e-5 "
        "--attn-logit-softcapping 30 --swiglu --disable-bias-linear --rotary-base 50000 "
        "--moe-token-dispatcher-type alltoall"
    )
    said = refused(chat / "model", chat, flags)
    assert "is another model than the command line describes" in said
    lines = [line.strip() for line in said.splitlines() if line.startswith("  - ")]
    names = {line.removeprefix("- ").split(":")[0] for line in lines}
    wrong = {"num_layers", "hidden_size", "normalization", "norm_epsilon"}
    assert names == {*wrong, "attn_logit_softcapping"}
    assert "- norm_epsilon: 1e-06 in the folder, 1e-05 in this run (--norm-epsilon)" in lines


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no config.json", "has safetensors files and no config.json"),
        ("unknown family", "config.json has model_type strange: the families here are llama"),
        ("missing shard", "model-00002-of-00002.safetensors is missing"),
        ("missing tensor", "the weights have no model.norm.weight"),
        ("other kind", "the checkpoint in --load is of kind bert, the command line builds gpt"),
        ("reward model", "holds a reward model, which scores answers and writes none"),
        ("no tokenizer", "has no tokenizer that is known here: give --tokenizer-model"),
        ("other tokenizer", "of its 622 ids are other tokens, such as"),
        ("larger tokenizer", "tokens, and the embedding of"),
        ("output exists", "it has files, and a new folder is written"),
        ("no class for it", "no Hugging Face family is this model"),
    ],
)
def test_what_cannot_start_says_why(name: str, message: str, chat: Path, tmp_path: Path) -> None:
    folder, flags = tmp_path / "model", "--sft"
    shutil.copytree(chat / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    weights = models.weights(folder)
    if name == "no config.json":
        (folder / "config.json").unlink()
    elif name == "unknown family":
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "strange"}))
    elif name == "missing shard":
        models.AUTO.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "model-00002-of-00002.safetensors").unlink()
    elif name == "missing tensor":
        del weights["model.norm.weight"]
        models.safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif name == "other kind":
        models.write(folder, "bert")
    elif name == "reward model":
        kind = models.transformers.AutoModelForSequenceClassification
        kind.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    elif name == "no tokenizer":
        for path in (*folder.glob("tokenizer*"), *folder.glob("*.txt"), folder / "vocab.json"):
            path.unlink(missing_ok=True)
    elif name == "other tokenizer":
        tokens = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = tokens["model"]["vocab"]
        last = len(vocabulary) - 1
        tokens["model"]["vocab"] = {
            token: last - number if number in (300, last - 300) else number
            for token, number in vocabulary.items()
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
        flags += f" --tokenizer-model {tmp_path / 'tokenizer.json'}"
    elif name == "larger tokenizer":
        flags += " --tokenizer-type NullTokenizer --vocab-size 5000"
    elif name == "output exists":
        flags += f" --save-hf {chat}"
    else:
        flags += f" --save-hf {tmp_path / 'out'} --window-size 8,0 --window-rotary-base 500"
    assert message in refused(folder, chat, flags)


def test_a_run_that_is_killed_while_it_writes_leaves_no_half_folder(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    flags = ["--sft", "--save", str(tmp_path / "ours"), "--save-hf", str(out)]
    monkeypatch.setenv("FAULTS", "save.before_fsync:kill:step0")
    with pytest.raises(AssertionError, match="SIGKILL"):
        tune(tmp_path, chat, *flags)
    assert not out.exists()
    assert len(list(tmp_path.glob("out.tmp-*"))) == 1
    monkeypatch.delenv("FAULTS")
    tune(tmp_path, chat, *flags)
    assert not list(tmp_path.glob("out.tmp-*"))
    tune(tmp_path / "whole", chat, "--sft", "--save-hf", str(tmp_path / "whole" / "out"))
    models.assert_same_weights(out, tmp_path / "whole" / "out")


def test_a_rank_reads_the_rows_that_it_holds(tmp_path: Path, chat: Path) -> None:
    """Boxes equal those of the complete tensors, and a wrong name or size is an error."""
    write_case(tmp_path, "qwen3 moe")
    with open_reader(tmp_path) as reader:
        values = {key: reader.read(key).clone() for key in reader.tensors}
        for key, stored in reader.tensors.items():
            offset = tuple(size // 3 for size in stored.shape)
            out = torch.empty([size // 2 for size in stored.shape], dtype=torch.float64)
            reader.read_box(key, offset, out)
            box = tuple(slice(at, at + n) for at, n in zip(offset, out.shape, strict=True))
            assert torch.equal(out, reader.read(key)[box].double()), key
        assert reader.rank_state(0) is None
        torch.save(models.weights(tmp_path), tmp_path / "pytorch_model.bin")
        for path in tmp_path.glob("*.safetensors"):
            path.unlink()
        with open_reader(tmp_path) as older:
            assert all(torch.equal(older.read(key), values[key]) for key in reader.tensors)
    folder = chat / "model"
    assert len(read_content(folder).asked) > 100
    with pytest.raises(CheckpointError, match="is not there"):
        resolve_folder(folder, 3)


def test_a_name_of_the_hub_becomes_a_folder(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, str | None]] = []
    patterns: list[str] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if model == "org/older":
            patterns.extend(allow_patterns)
            return str(tmp_path)
        asked.append((model, revision))
        if model == "org/gone":
            raise OSError("no such model\nand more")
        return str(chat / "model")

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for name in ("hf://org/name@v1", "org/name@v1", "org/name"):
        assert local_folder(name, "--load") == str(chat / "model")
    assert asked == [("org/name", "v1"), ("org/name", "v1"), ("org/name", None)]
    assert local_folder("org/older", "--load") == str(tmp_path)
    assert patterns[-1] == "pytorch_model*.bin*", "the model has no safetensors"
    convert.main(["--from", "hf://org/name@v2", "--to", "converted", "--no-verify"])
    assert asked[-1] == ("org/name", "v2")
    assert read_content(resolve_folder("converted")).asked["num_layers"] == 2
    (tmp_path / "runs").mkdir()
    for name in ("runs/new", "/org/name", "name", "a/b/c", str(chat / "model")):
        assert local_folder(name, "--load") == name
    assert local_folder("org/name", "--load", may_be_new=True) == "org/name"
    with pytest.raises(
        CheckpointError, match=r"--load org/gone is no folder here, .*no such model$"
    ):
        local_folder("org/gone", "--load")
