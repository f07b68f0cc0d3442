"""Fine-tuning on conversations with the real command line: packed rows, layouts, resume."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.datasets.utils import Split
from megatron.core.transformer.context_parallel import use_context_groups
from megatron.post_training.sft.dataset import SFTDataset, SFTDatasetConfig, SFTLowLevelDataset
from megatron.training.data import balanced_rows
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.chat import load_chat_template
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support import selection, tolerances
from tests.support.chat_templates import write_chat_tokenizer, write_conversations
from tests.support.ranks import run_ranks
from tests.support.runs import heard, losses, refusal, run_gpt, train_gpt

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

NUM_CONVERSATIONS = 24
SEQ_LENGTH = 256
STEPS = 3
KEYS = ("lm loss", "grad-norm", "lm loss validation")
EXACT = {"rtol": tolerances.LAYOUT[torch.float32]["loss"], "atol": 0.0}
BASE = (
    f"--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --lr 1e-3 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --train-iters {STEPS} "
    "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 1 --num-workers 0 --position-embedding-type rope --sft "
    "--group-query-attention --num-query-groups 2 --tokenizer-type HuggingFaceTokenizer "
    "--sft-alignment 4"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder with tokenizer and conversations, and the number of packed rows of an epoch."""
    folder = tmp_path_factory.mktemp("sft")
    write_chat_tokenizer(folder)
    write_conversations(folder / "chats.jsonl", NUM_CONVERSATIONS)
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    tokenizer = create_tokenizer(spec)
    config = SFTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ_LENGTH,
        blend=([str(folder / "chats.jsonl")], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=tokenizer,
        alignment=4,
        chat=load_chat_template(tokenizer, None, str(folder)),
    )
    path = str(folder / "chats.jsonl")
    rows = torch.arange(NUM_CONVERSATIONS).numpy()
    dataset = SFTDataset(SFTLowLevelDataset(path), path, rows, None, Split.train, config)
    return folder, dataset.rows.rows_per_epoch


def flags_of(folder: Path, batch: int, micro: int = 1) -> list[str]:
    path = folder / "chats.jsonl"
    return (
        f"--tokenizer-model {folder} --data-cache-path {folder}/cache --train-data-path {path} "
        f"--valid-data-path {path} --global-batch-size {batch} --micro-batch-size {micro}"
    ).split()


@pytest.fixture(scope="module")
def unpacked(data, tmp_path_factory):
    """One process, one conversation per row; each step reads all conversations."""
    flags = ["--no-sft-packing", *flags_of(data[0], NUM_CONVERSATIONS)]
    return run_gpt(tmp_path_factory.mktemp("unpacked"), *flags, base=BASE)


LAYOUTS = {
    "one process": (1, 1, ""),
    "micro-batches of 2": (1, 2, "--calculate-per-token-loss"),
    "TP2 SP": (2, 1, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, 2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, 2, "--context-parallel-size 2"),
    "CP2 a2a, allgather": (2, 1, "--context-parallel-size 2 --cp-comm-type a2a allgather"),
    "DP2 ZeRO": (2, 1, "--use-distributed-optimizer"),
    "TP2 PP2": (
        4,
        1,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
    ),
}


@pytest.mark.feature("Fine-tuning: packed conversations train as unpacked ones in every layout")
@pytest.mark.parametrize(
    "name", selection.only(["one process", "CP2 a2a, allgather", "DP2 ZeRO", "TP2 PP2"], LAYOUTS)
)
def test_packed_rows_train_as_one_conversation_per_row(tmp_path, data, unpacked, name):
    folder, num_rows = data
    assert num_rows % 2 == 0, "rows must divide over ranks and micro-batches"
    assert num_rows < NUM_CONVERSATIONS / 2
    ranks, micro, layout = LAYOUTS[name]
    flags = [*flags_of(folder, num_rows, micro), *layout.split()]
    found = run_gpt(tmp_path, *flags, base=BASE, world_size=ranks)
    for key in KEYS:
        assert losses(unpacked, key)
        torch.testing.assert_close(
            torch.tensor(losses(found, key), dtype=torch.float64),
            torch.tensor(losses(unpacked, key), dtype=torch.float64),
            **EXACT,
        )


@pytest.mark.feature("Fine-tuning: --epochs sets the number of steps by the rows after packing")
def test_epochs_read_every_conversation_as_often(tmp_path, data):
    folder, num_rows = data
    base = [flag for flag in BASE if flag not in ("--train-iters", str(STEPS))]
    flags = [*flags_of(folder, 4), "--epochs", "2", "--save", str(tmp_path / "saved")]
    whole = run_gpt(tmp_path / "whole", *flags[:-2], base=base)
    steps = -(-2 * num_rows // 4)
    assert len(losses(whole)) == steps
    named = run_gpt(tmp_path / "named", *flags[:-4], "--train-iters", str(steps), base=base)
    assert losses(named) == losses(whole)
    assert losses(named, "learning-rate") == losses(whole, "learning-rate")
    first = run_gpt(tmp_path / "first", *flags, "--exit-interval", "2", base=base)
    load = ["--load", str(tmp_path / "saved"), "--tensor-model-parallel-size", "2"]
    second = run_gpt(tmp_path / "second", *flags, *load, base=base, world_size=2)
    found = torch.tensor(losses(first) + losses(second), dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(losses(whole), dtype=torch.float64), **EXACT)
    unpacked = [*flags[:-4], "--epochs", "0.5", "--no-sft-packing"]
    assert len(losses(run_gpt(tmp_path / "half", *unpacked, base=base))) == NUM_CONVERSATIONS / 8


def test_a_schedule_longer_than_the_epochs_is_refused(tmp_path, data):
    base = [flag for flag in BASE if flag not in ("--train-iters", str(STEPS))]
    flags = [*flags_of(data[0], 4), "--epochs", "1", "--lr-warmup-iters", "100"]
    (said,) = run_ranks(refusal, 1, [*base, *flags])
    assert "--lr-warmup-iters 100 is not less than --train-iters" in said


UNPACKED = {
    "micro-batches of 3": (1, 3, ""),
    "TP2 SP": (2, 3, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, 2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, 2, "--context-parallel-size 2"),
    "DP2 ZeRO": (2, 1, "--use-distributed-optimizer --overlap-grad-reduce"),
    "TP2 PP2": (
        4,
        3,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
    ),
    "PP2 CP2": (4, 2, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
}


@pytest.mark.feature("Fine-tuning: rows of one conversation are as long as it, in every layout")
@pytest.mark.parametrize(
    "name", selection.only(["micro-batches of 3", "PP2 CP2", "TP2 SP"], UNPACKED)
)
def test_rows_of_different_lengths_train_alike_in_every_layout(tmp_path, data, unpacked, name):
    ranks, micro, layout = UNPACKED[name]
    flags = ["--no-sft-packing", *flags_of(data[0], NUM_CONVERSATIONS, micro), *layout.split()]
    found = run_gpt(tmp_path, *flags, base=BASE, world_size=ranks)
    for key in KEYS:
        torch.testing.assert_close(
            torch.tensor(losses(found, key), dtype=torch.float64),
            torch.tensor(losses(unpacked, key), dtype=torch.float64),
            **EXACT,
        )


HYBRID = {  # ranks, flags, sizes of groups that must occur
    "dp4": (4, "--max-seqlen-per-dp-cp-rank 64", {1, 2, 4}),
    "tp2 sp, recomputed, ZeRO": (
        4,
        "--max-seqlen-per-dp-cp-rank 128 --tensor-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --cp-comm-type allgather",
        {1, 2},
    ),
}


@pytest.mark.feature("Fine-tuning: context parallelism follows the length of each conversation")
@pytest.mark.parametrize("name", HYBRID)
def test_rows_on_groups_of_their_own_size_train_as_one_process(tmp_path, data, unpacked, name):
    ranks, flags, sizes = HYBRID[name]
    common = ["--no-sft-packing", *flags_of(data[0], NUM_CONVERSATIONS)]
    words = [*BASE, *common, "--hybrid-context-parallel", *flags.split()]
    metrics = ["--metrics-file", str(tmp_path / "metrics.jsonl")]
    for found in run_ranks(train_counting_groups, ranks, [*words, *metrics]):
        assert found == sizes
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for key in KEYS:
        torch.testing.assert_close(
            torch.tensor(losses(lines, key), dtype=torch.float64),
            torch.tensor(losses(unpacked, key), dtype=torch.float64),
            **EXACT,
        )


def train_counting_groups(rank, world_size, argv):
    """Train; return the sizes of the groups that this rank has been in."""
    sizes = set()

    def noting(model, groups):
        sizes.add(groups.cp.size())
        use_context_groups(model, groups)

    with mock.patch.object(balanced_rows, "use_context_groups", noting):
        train_gpt(rank, world_size, argv)
    return sizes


def test_experts_leave_padding_out(tmp_path, data, unpacked):
    folder, num_rows = data
    moe = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none".split()
    runs = [
        run_gpt(tmp_path / name, *flags, *moe, *layout.split(), base=BASE, world_size=ranks)
        for name, ranks, layout, flags in (
            (
                "unpacked",
                1,
                "--no-sft-packing",
                flags_of(folder, NUM_CONVERSATIONS),
            ),
            ("packed", 1, "", flags_of(folder, num_rows, 2)),
            (
                "unpacked ep2 pp2",
                4,
                "--no-sft-packing --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                "--moe-token-dispatcher-type alltoall",
                flags_of(folder, NUM_CONVERSATIONS, 2),
            ),
            (
                "unpacked ep2, all-gathered tokens",
                2,
                "--no-sft-packing --expert-model-parallel-size 2 "
                "--moe-token-dispatcher-type allgather",
                flags_of(folder, NUM_CONVERSATIONS, 2),
            ),
            (
                "tp2 ep2",
                2,
                "--tensor-model-parallel-size 2 --sequence-parallel "
                "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
                flags_of(folder, num_rows, 2),
            ),
        )
    ]
    for key in KEYS:
        expected, *others = (torch.tensor(losses(run, key), dtype=torch.float64) for run in runs)
        for found in others:
            torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.feature("Fine-tuning: a run goes on with another number of ranks, sample by sample")
def test_a_resumed_run_in_another_layout_reads_every_conversation_once(tmp_path, data):
    folder, num_rows = data
    flags = [*flags_of(folder, num_rows // 2), "--train-iters", "6", "--save", str(tmp_path / "c")]
    whole = run_gpt(tmp_path / "whole", *flags[:-2], base=BASE)
    first = run_gpt(tmp_path / "first", *flags, "--exit-interval", "3", base=BASE, world_size=2)
    flags += ["--load", str(tmp_path / "c")]
    second = run_gpt(tmp_path / "second", *flags, base=BASE)
    found = torch.tensor(losses(first) + losses(second), dtype=torch.float64)
    expected = torch.tensor(losses(whole), dtype=torch.float64)
    torch.testing.assert_close(found, expected, **EXACT)


def test_wrong_conversations_end_a_run_before_it_writes_anything(tmp_path, data):
    folder, _ = data
    path = tmp_path / "chats.jsonl"
    lines = (folder / "chats.jsonl").read_text().splitlines()
    lines[2] = '{"messages": []}'
    lines[4] = "{"
    path.write_text("\n".join(lines))
    flags = flags_of(folder, 2)
    flags[flags.index("--train-data-path") + 1] = str(path)
    argv = [*BASE, *flags, "--save", str(tmp_path / "save")]
    (said,) = run_ranks(refusal, 1, argv)
    assert f"2 of {NUM_CONVERSATIONS} conversations are wrong:" in said
    assert f"{path}, line 3: messages is []; it must be a list of messages" in said
    assert f"{path}, line 5: it is no JSON" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "save").glob("[!.]*"))  # no checkpoint and no tracker


@pytest.mark.feature("Fine-tuning: --sft-show-sample prints a conversation and what is trained")
def test_a_sample_is_shown_with_what_is_trained(tmp_path, data):
    folder, _ = data
    path = tmp_path / "one.jsonl"
    turns = [("user", "Ask it"), ("assistant", "Say so."), ("user", "Why"), ("assistant", "No.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text(json.dumps({"messages": messages}))
    flags = flags_of(folder, 2)
    flags[flags.index("--train-data-path") + 1] = str(path)
    argv = [*BASE, *flags, "--train-iters", "1", "--sft-show-sample"]
    ((said, complaint),) = run_ranks(heard, 1, argv)
    assert complaint == ""
    start = next(i for i, line in enumerate(said) if line.startswith("first training sample"))
    assert "are trained ({+marked+}):" in said[start]
    assert said[start + 1 : start + 11] == [
        "<|im_start|>system",
        "Be helpful.<|im_end|>",
        "<|im_start|>user",
        "Ask it<|im_end|>",
        "<|im_start|>assistant",
        "{+Say so.<|im_end|>",
        "+}<|im_start|>user",
        "Why<|im_end|>",
        "<|im_start|>assistant",
        "{+No.<|im_end|>",
    ]
    assert any("lm loss" in line for line in said[start:])
