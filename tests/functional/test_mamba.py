"""pretrain_mamba.py: a hybrid is saved, goes on in another layout, and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM
from megatron.inference.generation import open_writer
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.support.runs import losses, run_gpt

HYBRID = (
    "--model-kind mamba --num-layers 4 --hybrid-override-pattern M*ME --num-experts 4 "
    "--moe-aux-loss-coeff 0.01 --mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 "
    "--is-hybrid-model --position-embedding-type none --normalization RMSNorm "
    "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
).split()
AHEAD = ["--hybrid-override-pattern", "M*ME/M*E/M*E", "--mtp-loss-scaling-factor", "0.5"]
REPEATED = [
    *["--hybrid-override-pattern", "M*|ME/*E", "--mtp-num-layers", "2"],
    *["--mtp-use-repeated-layer", "--mtp-loss-scaling-factor", "0.5"],
]
LAYOUTS = [
    (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    (4, "--context-parallel-size 2 --use-distributed-optimizer --expert-model-parallel-size 2"),
]


def write(rank: int, world_size: int, load: str) -> list[int]:
    writer = open_writer(load, device_kind="cpu")
    prompt = "5 7 11 13"
    llm = LLM(writer.engine, writer.tokenizer)
    answers = llm.generate(prompt, SamplingParams(num_tokens_to_generate=8, top_k=1))
    if not answers:
        return []
    tokens = answers[0].tokens
    ids = [int(word) for word in prompt.split()]
    model = writer.engine.model
    for item in tokens if world_size == 1 else ():  # each is the most likely one of a full pass
        with torch.no_grad():
            logits = model.module(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        assert item.token == int(logits[0, -1, : model.vocab_size].argmax())
        ids.append(item.token)
    return [item.token for item in tokens]


@pytest.mark.feature("Mamba: a hybrid with experts goes on in any other layout, and writes")
@pytest.mark.feature("Mamba: multi-token prediction in hybrids, in all layouts and formats")
@pytest.mark.parametrize(
    ("ckpt_format", "more"),
    selection.first(2, [("safetensors_dist", AHEAD), ("torch_dist", REPEATED), ("torch", [])]),
)
def test_a_hybrid_goes_on_in_another_layout(
    tmp_path: Path, ckpt_format: str, more: list[str]
) -> None:
    saves = ["--save", str(tmp_path / "saved"), "--save-interval", "3"]
    kind = ["--ckpt-format", ckpt_format]
    alone = run_gpt(tmp_path / "alone", *HYBRID, *more, *saves, *kind)
    assert losses(alone)[-1] < losses(alone)[0]
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    loads = ["--load", str(tmp_path / "saved")]
    is_own = ckpt_format == "safetensors_dist"
    for number, (ranks, layout) in enumerate(LAYOUTS if is_own else LAYOUTS[:1]):
        flags = [*HYBRID, *more, *loads, *kind, *layout.split()]
        further = run_gpt(tmp_path / str(number), *flags, world_size=ranks)
        assert losses(further) == pytest.approx(losses(alone)[3:], rel=1e-5)
    if is_own:
        one, *two = run_ranks(write, 1, loads[1]) + run_ranks(write, 2, loads[1])
        assert two[0] == one
