"""Training on pairs of answers with the real command line: TRL's numbers, layouts, resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import megatron.post_training  # noqa: F401  registers its objectives
from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.convert import convert
from megatron.training.conversion.source import ConversionRequest
from tests.golden import trl_preference
from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import losses, refusal, run_gpt

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
load_file = safetensors.load_file
save_file = safetensors.save_file

GOLDEN = json.loads(Path(trl_preference.__file__).with_suffix(".json").read_text())
OURS = {
    "loss": "dpo loss",
    "grad_norm": "grad-norm",
    "rewards/chosen": "reward of chosen",
    "rewards/rejected": "reward of rejected",
    "rewards/margins": "reward margin",
    "rewards/accuracies": "reward accuracy",
}
EXACT = {"rtol": tolerances.LAYOUT[torch.float32]["loss"], "atol": 1e-6}
BASE = (
    "--device cpu --use-checkpoint-args --finetune --tokenizer-type HuggingFaceTokenizer "
    "--seq-length 64 --lr 1e-3 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.999 "
    f"--train-iters {trl_preference.STEPS} --log-interval 1 --eval-interval 1000 --eval-iters 0 "
    "--num-workers 0 --micro-batch-size 1 --sft-alignment 4"
).split()
DPO = f"--dpo-beta {trl_preference.BETA}".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder with the model in both forms, the tokenizer and the pairs."""
    folder = tmp_path_factory.mktemp("preference")
    trl_preference.save_tokenizer(folder / "hf")
    trl_preference.tiny_llama().save_pretrained(folder / "hf")
    request = ConversionRequest(
        source=folder / "hf", target=folder / "base", format="safetensors_dist"
    )
    convert(request, say=lambda text: None)
    write_pairs(folder / "pairs.jsonl", trl_preference.ROWS)
    return folder


def write_pairs(path: Path, rows) -> None:
    names = "prompt", "chosen", "rejected"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))


def flags_of(model: Path, batch: int = 2, load: Path | None = None) -> list[str]:
    return (
        f"--load {load or model / 'base'} --tokenizer-model {model / 'hf'} "
        f"--train-data-path {model / 'pairs.jsonl'} --global-batch-size {batch}"
    ).split()


def assert_equal(found, expected, names=OURS) -> None:
    """Compare the steps of a run with TRL's; ``names``: theirs -> ours."""
    for theirs, ours in names.items():
        numbers = torch.tensor([step[theirs] for step in expected], dtype=torch.float64)
        mine = torch.tensor(losses(found, ours), dtype=torch.float64)
        torch.testing.assert_close(mine, numbers, rtol=2e-5, atol=2e-6)


@pytest.mark.feature("DPO: losses, rewards and gradient norms are TRL's")
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_losses_and_rewards_are_those_of_trl(tmp_path, model, loss):
    flags = [*flags_of(model), *DPO, "--dpo-loss-type", loss, "--data-cache-path", str(tmp_path)]
    assert_equal(run_gpt(tmp_path, *flags, base=BASE), GOLDEN[loss])


LAYOUTS = {
    "micro-batch of 2": (1, "--micro-batch-size 2"),
    "one pair per row": (1, "--no-sft-packing --global-batch-size 4"),
    "one pair per row, TP2 PP2": (
        4,
        "--no-sft-packing --global-batch-size 4 --micro-batch-size 2 --sequence-parallel "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2 --seq-length 128"),
    "DP2 ZeRO": (2, "--use-distributed-optimizer"),
}


@pytest.mark.feature("DPO: the same losses in every layout and micro-batch")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_the_losses_of_one_process(tmp_path, model, name):
    ranks, layout = LAYOUTS[name]
    cache = ["--data-cache-path", str(tmp_path / "cache")]
    flags = [*flags_of(model), *DPO, *cache, *layout.split()]
    assert_equal(run_gpt(tmp_path, *flags, base=BASE, world_size=ranks), GOLDEN["sigmoid"])


def test_an_evaluation_of_pairs_has_no_perplexity(tmp_path, model):
    flags = [*flags_of(model), *DPO, "--data-cache-path", str(tmp_path / "cache")]
    flags += ["--valid-data-path", str(model / "pairs.jsonl"), "--eval-iters", "1"]
    found = run_gpt(tmp_path, *flags, "--eval-interval", "2", "--train-iters", "2", base=BASE)
    (line, *_) = (line for line in found if line["kind"] == "validation")
    assert "dpo loss validation" in line
    assert not [name for name in line if "ppl" in name]


@pytest.mark.feature("DPO: a run goes on with the log-probabilities of its beginning")
def test_a_resumed_run_has_the_reference_of_its_beginning(tmp_path, model):
    save = tmp_path / "save"
    flags = [*flags_of(model), *DPO, "--save", str(save), "--data-cache-path"]
    first = [*flags, str(tmp_path / "a"), "--exit-interval", "2"]
    begun = run_gpt(tmp_path / "first", *first, base=BASE)
    assert len(list(save.glob("reference-*.npy"))) == 1
    base = [flag for flag in BASE if flag != "--finetune"]
    on = [*flags_of(model, load=save), *DPO, "--data-cache-path", str(tmp_path / "b")]
    layout = ["--tensor-model-parallel-size", "2"]
    rest = run_gpt(tmp_path / "second", *on, *layout, base=base, world_size=2)
    assert_equal([*begun, *rest], GOLDEN["sigmoid"])
    for file in save.glob("reference-*.npy"):
        file.unlink()
    shutil.rmtree(tmp_path / "b")
    (said,) = run_ranks(refusal, 1, [*base, *on])
    assert "log-probabilities under the reference model" in said
    assert "restore the files reference-*.npy, or start again with --finetune" in said
    assert "Traceback" not in said


def test_the_reference_is_computed_once_for_weights_and_data(tmp_path, model):
    flags = [*flags_of(model), *DPO, "--data-cache-path", str(tmp_path / "cache")]
    run_gpt(tmp_path / "first", *flags, "--train-iters", "1", base=BASE)
    (file,) = (tmp_path / "cache").glob("reference-*.npy")
    written_at = file.stat().st_mtime_ns
    assert_equal(run_gpt(tmp_path / "second", *flags, base=BASE), GOLDEN["sigmoid"])
    assert file.stat().st_mtime_ns == written_at
    assert len(list((tmp_path / "cache").glob("reference-*.npy"))) == 1


def test_wrong_pairs_end_a_run_with_file_and_line(tmp_path, model):
    path = tmp_path / "pairs.jsonl"
    write_pairs(path, [*trl_preference.ROWS, ("why", " the cat", " the cat")])
    flags = [*flags_of(model), "--data-cache-path", str(tmp_path / "cache")]
    flags[flags.index("--train-data-path") + 1] = str(path)
    (said,) = run_ranks(refusal, 1, [*BASE, *flags, *DPO])
    assert "1 of 5 pairs are wrong:" in said
    assert f"{path}, line 5: chosen and rejected are equal; remove the row" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("objective", ["--sft", "--dpo-beta 0.1", "--reward-model"])
def test_losses_of_experts_keep_their_weight(tmp_path, model, objective):
    """A strong balance loss dominates the gradient: its norm must not depend on the objective.

    The loss of --sft is divided by tokens, that of pairs by pairs, which all context-parallel ranks
    count.
    """
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in trl_preference.ROWS]
    if objective == "--sft":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    moe = (
        "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --lr 1e-3 "
        "--seq-length 64 --max-position-embeddings 64 --train-iters 1 --eval-iters 0 "
        "--log-interval 1 --num-workers 0 --tokenizer-type HuggingFaceTokenizer --num-experts 4 "
        "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e4 "
        "--position-embedding-type rope --micro-batch-size 1 --hidden-dropout 0 "
        f"--attention-dropout 0 --tokenizer-model {model / 'hf'} --train-data-path {path} "
        f"--global-batch-size 2 --untie-embeddings-and-output-weights {objective} "
        "--sft-alignment 4"
    ).split()
    (norm,) = losses(run_gpt(tmp_path / "alone", base=moe), "grad-norm")
    assert 1.6e4 < norm < 2.2e4, norm
    layout = ["--context-parallel-size", "2"]
    found = losses(run_gpt(tmp_path / "cp2", *layout, base=moe, world_size=2), "grad-norm")
    assert found == pytest.approx([norm], rel=EXACT["rtol"])


@pytest.mark.feature("Reward models: from Hugging Face and back, with the losses of TRL")
def test_reward_models_have_the_losses_of_trl_and_go_back(tmp_path, model):
    hf = tmp_path / "hf"
    trl_preference.save_tokenizer(hf)
    trl_preference.tiny_llama("LlamaForSequenceClassification", num_labels=1).save_pretrained(hf)
    said: list[str] = []
    request = ConversionRequest(source=hf, target=tmp_path / "base", format="safetensors_dist")
    convert(request, say=said.append)
    assert "the logits of 3 prompts agree" in " ".join(said)
    flags = [*flags_of(model, load=tmp_path / "base"), "--reward-model", "--finetune"]
    cache = ["--data-cache-path", str(tmp_path / "cache")]
    found = run_gpt(tmp_path / "run", *flags, *cache, base=BASE)
    names = {
        "loss": "reward loss",
        "grad_norm": "grad-norm",
        "margin": "reward margin",
        "accuracy": "reward accuracy",
    }
    assert_equal(found, GOLDEN["reward"], names)
    back = ConversionRequest(source=tmp_path / "base", target=tmp_path / "back", format="hf")
    convert(back, say=said.append)
    theirs = load_file(hf / "model.safetensors")
    ours = load_file(tmp_path / "back" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_classifiers_of_several_labels_are_refused(tmp_path):
    hf = tmp_path / "hf"
    trl_preference.tiny_llama("LlamaForSequenceClassification", num_labels=3).save_pretrained(hf)
    request = ConversionRequest(source=hf, target=tmp_path / "base", format="safetensors_dist")
    with pytest.raises(CheckpointError, match="only classifiers of one label"):
        convert(request, say=lambda text: None)
    assert not (tmp_path / "base").exists()


def test_a_reward_model_of_a_language_model_needs_finetune(tmp_path, model):
    flags = ["--data-cache-path", str(tmp_path / "cache"), "--train-iters", "1"]
    save = tmp_path / "save"
    run_gpt(tmp_path, *flags_of(model), *DPO, *flags, "--save", str(save), base=BASE)
    base = [flag for flag in BASE if flag != "--finetune"]
    (said,) = run_ranks(refusal, 1, [*base, *flags_of(model, load=save), *flags, "--reward-model"])
    assert "optimizer state does not fit a reward model: give --finetune" in said
    assert "Traceback" not in said


@pytest.mark.feature("Reward models: the same losses in every layout")
def test_reward_models_are_equal_in_every_layout(tmp_path, model):
    flags = [*flags_of(model), "--reward-model", "--data-cache-path", str(tmp_path / "cache")]
    keys = "reward loss", "grad-norm", "reward margin"
    layouts = [LAYOUTS[name] for name in ("TP2 SP", "PP2", "CP2", "DP2 ZeRO")]
    one, *others = (
        run_gpt(tmp_path / str(i), *flags, *layout.split(), base=BASE, world_size=ranks)
        for i, (ranks, layout) in enumerate([(1, ""), *layouts])
    )
    for key in keys:
        expected = torch.tensor(losses(one, key), dtype=torch.float64)
        assert len(expected) == trl_preference.STEPS
        for other in others:
            found = torch.tensor(losses(other, key), dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.feature("Reward models: the new layer is trained and saved with adapters")
def test_a_reward_model_with_adapters_goes_on_in_another_layout(tmp_path, model):
    adapters = "--reward-model --lora-rank 4 --lora-alpha 8 --lora-target-modules all-linear"
    cache = ["--data-cache-path", str(tmp_path / "cache")]
    flags = [*flags_of(model), *adapters.split(), *cache]
    whole = run_gpt(tmp_path / "whole", *flags, base=BASE)
    save = tmp_path / "save"
    first = run_gpt(tmp_path / "a", *flags, "--save", str(save), "--exit-interval", "2", base=BASE)
    base = [flag for flag in BASE if flag != "--finetune"]
    on = [*flags_of(model, load=save), *adapters.split(), *cache]
    layout = ["--pipeline-model-parallel-size", "2"]
    rest = run_gpt(tmp_path / "b", *on, *layout, base=base, world_size=2)
    found = torch.tensor(losses([*first, *rest], "reward loss"), dtype=torch.float64)
    expected = torch.tensor(losses(whole, "reward loss"), dtype=torch.float64)
    torch.testing.assert_close(found, expected, **EXACT)
    assert expected[-1] < 0.99 * expected[0]


@pytest.mark.feature("Reward models: adapters are merged, and written for PEFT with the new layer")
def test_adapters_of_a_reward_model_are_converted(tmp_path, model):
    adapters = ["--reward-model", "--lora-rank", "4", "--lora-alpha", "8", "--save"]
    flags = [*flags_of(model), *adapters, str(tmp_path / "ours"), "--data-cache-path"]
    run_gpt(tmp_path / "run", *flags, str(tmp_path / "cache"), base=BASE)
    for source, target, form, base in (
        ("ours", "merged", "hf", None),
        ("ours", "peft", "peft", None),
        ("peft", "again", "safetensors_dist", model / "base"),
        ("again", "merged again", "hf", None),
    ):
        request = ConversionRequest(
            source=tmp_path / source, target=tmp_path / target, format=form, base=base
        )
        convert(request, say=lambda text: None)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    again = load_file(tmp_path / "merged again" / "model.safetensors")
    assert merged.keys() == again.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(again[name], weight)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["score"]
    saved = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert torch.equal(saved["base_model.model.score.weight"], merged["score.weight"])
    assert merged["score.weight"].abs().max() > 0


def test_other_modules_beside_adapters_are_refused(tmp_path, model):
    files = tmp_path / "peft"
    files.mkdir()
    for modules, size, reason in (
        (["lm_head"], 1, "has modules_to_save lm_head: .* must hold their weights"),
        (["score"], 3, r"score.weight of shape .3, 32.: only classifiers of one label"),
    ):
        config = {"peft_type": "LORA", "r": 4, "modules_to_save": modules}
        (files / "adapter_config.json").write_text(json.dumps(config))
        names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{m}.weight" for m in "AB"]
        weights = {names[0]: torch.zeros(4, 32), names[1]: torch.zeros(32, 4)}
        weights["base_model.model.score.weight"] = torch.zeros(size, 32)
        save_file(weights, files / "adapter_model.safetensors")
        request = ConversionRequest(
            source=files,
            target=tmp_path / "ours",
            format="safetensors_dist",
            base=model / "base",
        )
        with pytest.raises(CheckpointError, match=reason):
            convert(request, say=lambda text: None)
