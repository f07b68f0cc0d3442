"""Draft heads from the command line: training in several layouts, going on, drafting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.config.errors import CheckpointError
from megatron.core.inference.paged_engine.options import DraftKind, EngineOptions
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.generation import open_writer
from megatron.training.conversion.convert import ConversionRequest, convert
from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, run_gpt, run_gpt_in_virtual_ranks

LLAMA = (
    "--position-embedding-type rope --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--swiglu --disable-bias-linear"
).split()
LEARNING = [*TINY, *"--train-iters 30 --lr 1e-2 --lr-decay-iters 1000".split()]
EAGLE = "--export-num-eagle-layers 1 --export-eagle-algorithm eagle3".split()
HEADS = {
    "medusa": ["--export-num-medusa-heads", "2"],
    "eagle3": [*EAGLE, "--export-draft-vocab-size", "64"],
    "mtp": ["--export-num-eagle-layers", "1"],
}
SAVED = ["--save-interval", "30"]
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a model that counts; return its directory."""
    folder = tmp_path_factory.mktemp("model")
    run_gpt(folder / "run", *LLAMA, "--save", str(folder / "ck"), *SAVED, base=LEARNING)
    return str(folder / "ck")


@pytest.fixture(scope="module")
def plain(model: str) -> Any:
    """The greedy texts of the model without drafts."""
    return run_ranks(tokens, 1, model, "ngram", 0)[0][0]


def losses(metrics: list[dict[str, Any]]) -> list[list[float]]:
    """Return the losses of each step, that of the model first."""
    return [
        [value for name, value in line.items() if name.endswith(" loss")]
        for line in metrics
        if "lm loss" in line
    ]


def tokens(rank: int, world_size: int, load: str, kind: DraftKind, count: int) -> Any:
    """Return the tokens of four greedy texts, and the numbers of steps and of accepted drafts."""
    options = EngineOptions(draft_model=kind, num_draft_tokens=count)
    engine = open_writer(load, device_kind="cpu", options=options).engine
    if rank:
        engine.follow()
        return None
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=24, ignore_eos=True)
    prompts = ([3, 4, 5], [40, 41], [9], [60, 61, 62, 63])
    asked = [engine.model.request(str(i), p, params) for i, p in enumerate(prompts)]
    found = {name: [t.token for t in row] for name, row in engine.generate(asked).items()}
    engine.close()
    stats = engine.stats()
    steps = stats.num_draft_steps
    assert stats.tokens_per_step == 1 + stats.num_accepted_drafts / max(steps, 1)
    assert stats.num_drafts == 0 or steps <= stats.num_drafts <= count * steps
    return found, stats.num_drafts, stats.num_accepted_drafts


@pytest.mark.feature("Draft heads: the engine drafts by them; greedy text is the same")
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp"])
def test_heads_learn_and_the_engine_accepts_what_they_draft(
    tmp_path: Path, model: str, plain: Any, kind: str
) -> None:
    start = ["--load", model, "--finetune"]
    own = str(tmp_path / "heads")
    alone = run_gpt(
        tmp_path / "alone", *LLAMA, *HEADS[kind], *start, "--save", own, *SAVED, base=LEARNING
    )
    found = losses(alone)
    assert sum(found[-1][1:]) < 0.6 * sum(found[0][1:])
    (saved,) = Path(own).glob("iter_*/*.safetensors")
    prefix = ("mtp.", "optimizer.") if kind == "mtp" else ("draft.", "optimizer.")
    others = [name for name in load_file(saved) if not name.startswith(prefix)]
    assert not others, "the base is named, not saved"

    draft_model = "mtp" if kind == "mtp" else "heads"
    text, num_drafts, num_accepted = run_ranks(tokens, 2, own, draft_model, 2)[0]
    assert text == plain
    assert num_accepted > 0.5 * num_drafts > 0, "each step gives more than one token"
    assert run_ranks(tokens, 1, own, "ngram", 0)[0][0] == plain


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp"])
def test_layouts_train_alike_and_go_on_in_each_other(tmp_path: Path, model: str, kind: str) -> None:
    flags = [*LLAMA, *HEADS[kind]]
    start = ["--load", model, "--finetune"]
    alone = losses(run_gpt(tmp_path / "alone", *flags, *start))
    own = str(tmp_path / "heads")
    saved = ["--save", own, "--save-interval", "2", "--exit-interval", "2"]
    first, _ = run_gpt_in_virtual_ranks(tmp_path / "first", *flags, *start, *saved, *LAYOUT)
    rest = run_gpt(tmp_path / "rest", *flags, "--load", own)
    found = [*losses(first)[:2], *losses(rest)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), **tolerances.LAYOUT_LOSS)


@pytest.mark.feature("Draft heads: folders that vLLM and SGLang read, both ways")
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_folder_of_heads_is_written_beside_the_model_and_read_again(
    tmp_path: Path, model: str, kind: str
) -> None:
    own = str(tmp_path / "heads")
    flags = [*LLAMA, *HEADS[kind], "--load", model, "--finetune", "--train-iters", "2"]
    run_gpt(tmp_path / "run", *flags, "--save", own, "--save-interval", "2")
    said: list[str] = []
    folder = convert(_request(own, tmp_path / "hf", format="hf"), said.append)
    assert any("agree" in line for line in said), "the model is as without heads"
    found = load_file(folder / "draft/model.safetensors")
    config = json.loads((folder / "draft/config.json").read_text())
    (saved,) = Path(own).glob("iter_*/*.safetensors")
    ours = {name: t for name, t in load_file(saved).items() if name.startswith("draft.")}
    if kind == "medusa":
        assert config["architectures"] == ["MedusaModel"]
        assert torch.equal(found["blocks.1.layers.0.bias"], ours["draft.heads.1.linear.bias"])
        assert torch.equal(found["lm_heads.0.weight"], ours["draft.heads.0.output_layer.weight"])
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        drafted = torch.arange(64) + found["d2t"]
        assert torch.equal(drafted, found["t2d"].nonzero().flatten())
        heads = ours["draft.self_attention.linear_qkv.weight"].unflatten(0, (4, 3, -1))
        for part, name in enumerate("qkv"):
            theirs = found[f"midlayer.self_attn.{name}_proj.weight"]
            assert torch.equal(theirs, heads[:, part].flatten(0, 1))
    with pytest.raises(CheckpointError, match="of another base: .*give their base with --base"):
        convert(_request(own, tmp_path / "no", base=Path(own)), said.append)
    target = tmp_path / "again"
    convert(_request(str(folder / "draft"), target, base=Path(model)), said.append)
    (again,) = target.glob("*/*.safetensors")
    assert ours.keys() == load_file(again).keys()
    assert all(torch.equal(t, ours[name]) for name, t in load_file(again).items())
    whole = tmp_path / "whole"
    convert(_request(own, whole), said.append)
    texts = [run_ranks(tokens, 1, str(load), "heads", 2)[0] for load in (own, target, whole)]
    assert texts[0] == texts[1] == texts[2]


def _request(source: str, target: Path, **more: Any) -> ConversionRequest:
    return ConversionRequest(
        source=Path(source), target=target, **{"format": "safetensors_dist"} | more
    )


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_folders_of_other_heads_are_refused(tmp_path: Path, model: str, kind: str) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    name = {"medusa": "MedusaModel", "eagle3": "LlamaForCausalLMEagle3"}[kind]
    config = {"architectures": [name], "hidden_size": 48, "num_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="give the checkpoint of their model with --base"):
        convert(_request(str(folder), tmp_path / "to"))
    with pytest.raises(CheckpointError, match="hidden_size 48, heads of this model need 32"):
        convert(_request(str(folder), tmp_path / "to", base=Path(model)))
