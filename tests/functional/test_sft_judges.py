"""Fine-tuning against transformers with -100 labels and TRL's SFTTrainer: figures in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.core.datasets.conversations import Conversation
from megatron.post_training.sft.dataset import encode_conversation
from megatron.training.conversion.convert import HF, ConversionRequest, convert
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.chat import load_chat_template
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.golden.make_sft_losses import GOLDEN, conversations, digest, write_model
from tests.support.runs import losses, run_gpt

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

EXPECTED = json.loads(GOLDEN.read_text())
LIMIT = 1e-6
STEP = 1e4  # learning rate of one step: weights move by many times their size
LAYOUTS = {
    "packed": (1, "--seq-length 320 --micro-batch-size 1 --global-batch-size 1"),
    "a conversation per row": (
        1,
        "--seq-length 128 --micro-batch-size 2 --global-batch-size 6 --no-sft-packing",
    ),
    "TP2 SP": (
        2,
        "--seq-length 320 --micro-batch-size 1 --global-batch-size 1 "
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "CP2": (
        2,
        "--seq-length 320 --micro-batch-size 1 --global-batch-size 1 --context-parallel-size 2",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face, converted to ``ours``, and its conversations."""
    folder = write_model(tmp_path_factory.mktemp("judges"))
    request = ConversionRequest(
        source=folder, target=folder / "ours", format="safetensors_dist", verify=False
    )
    convert(request)
    lines = [json.dumps({"messages": messages}) for messages in conversations()]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder


def test_tokens_and_masks_are_those_of_transformers(folder: Path) -> None:
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    tokenizer = create_tokenizer(spec)
    chat = load_chat_template(tokenizer, None, str(folder))
    for messages, ids, mask in zip(
        conversations(), EXPECTED["tokens"], EXPECTED["masks"], strict=True
    ):
        encoded = encode_conversation(Conversation(tuple(messages)), tokenizer, chat)
        assert encoded.tokens.tolist() == ids
        assert encoded.is_trained.tolist() == [bool(x) for x in mask]


@pytest.mark.feature("Fine-tuning: loss and gradients are those of transformers and TRL")
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_the_judges(
    tmp_path: Path, folder: Path, name: str
) -> None:
    ranks, layout = LAYOUTS[name]
    base = (
        f"--device cpu --use-checkpoint-args --load {folder / 'ours'} --finetune --sft "
        f"--tokenizer-model {folder} --train-data-path {folder / 'chats.jsonl'} --train-iters 1 "
        f"--data-cache-path {folder / 'cache'} --optimizer sgd --sgd-momentum 0 --lr {STEP} "
        "--lr-decay-style constant --weight-decay 0 --clip-grad 0 --eval-iters 0 --num-workers 0 "
        f"--log-interval 1 --save {tmp_path / 'after'} {layout}"
    ).split()
    (loss,) = losses(run_gpt(tmp_path / "run", base=base, world_size=ranks))
    request = ConversionRequest(
        source=tmp_path / "after", target=tmp_path / "back", format=HF, verify=False
    )
    convert(request)
    models = pytest.importorskip("tests.support.hugging_face_models")
    before = models.weights(folder)
    after = models.weights(tmp_path / "back")
    found = digest({name: (before[name] - weight) / STEP for name, weight in after.items()})
    for judge in ("transformers", "trl"):
        assert loss == pytest.approx(EXPECTED[judge]["loss"], rel=LIMIT)
        expected = EXPECTED[judge]["gradients"]
        assert found.keys() == expected.keys()
        # Of the gradient as one vector: TRL and transformers differ by as much for one matrix.
        limit = LIMIT * math.hypot(*(norm for norm, _ in expected.values()))
        for parameter, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[parameter], dtype=torch.float64),
                torch.tensor(values, dtype=torch.float64),
                rtol=0.0,
                atol=limit,
                msg=lambda text, parameter=parameter: f"{parameter}: {text}",
            )
