"""Compare fine-tuning on conversations with TRL on a CPU, packed and unpacked.

    python benchmarks/sft.py --trl-python /path/to/python-with-trl

All contenders start from the same Llama of Hugging Face and read the same conversations, whose
lengths are log-normal.  Each turn of a contender is a process with one thread; turns alternate.
Measured are the CPU time of a complete step, and tokens of conversations, without padding.  TRL
joins the packed rows of a batch into one, whose attention a CPU computes under a dense mask: it
gets one row at a time and accumulates gradients, which is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OURS = ("ours, packed", "ours, one per row")
TRL = ("TRL, packed", "TRL, padded")
WARMUP = 2  # steps that are not counted
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BF16 = "--bf16 --no-load-optim --load-main-params-from-ckpt"  # the checkpoint is in fp32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", default=sys.executable, help="Python that has trl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a turn")
    parser.add_argument("--rows", type=int, default=4, help="rows, or conversations, of a step")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--contenders", default=",".join((*OURS, *TRL)).replace(", ", "; "))
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        steps = step_ours(args) if args.worker in OURS else step_trl(args)
        print(json.dumps(steps), flush=True)
        return
    names = [name.strip().replace(";", ",") for name in args.contenders.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), args)
        found: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                found[name] += turn(name, Path(folder), args)
    report(found)


def report(found: dict[str, list[float]]) -> None:
    best = statistics.median(found[OURS[0]])
    print("| contender | tokens/s a core | ours, packed / it |")
    print("|---|---|---|")
    for name, rates in found.items():
        rate = statistics.median(rates)
        print(f"| {name} | {rate:.0f} | {best / rate:.2f} |")


def turn(name: str, folder: Path, args: argparse.Namespace) -> list[float]:
    """Return tokens per second of each counted step."""
    python = sys.executable if name in OURS else args.trl_python
    flags = [f"--{n}={vars(args)[n.replace('-', '_')]}" for n in ("steps", "rows", "seq-length")]
    command = [python, __file__, "--worker", name, "--folder", str(folder), *flags]
    ended = subprocess.run(
        [*command, "--dtype", args.dtype],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[[")]
    if not lines:
        raise SystemExit(f"{name} failed:\n{ended.stderr[-3000:]}")
    return [tokens / seconds for tokens, seconds in json.loads(lines[-1])[WARMUP:]]


def write_inputs(folder: Path, args: argparse.Namespace) -> None:
    """Write a Llama with tokenizer and template, its conversion, and conversations."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron.training.conversion.convert import ConversionRequest, convert

    model = folder / "model"
    model.mkdir()
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    write_tokenizer(model, text)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=args.seq_length,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    ours = ConversionRequest(
        source=model, target=folder / "ours", format="safetensors_dist", verify=False
    )
    convert(ours)
    random = np.random.default_rng(0)
    words = text.split()
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(1000):
            sizes = np.minimum(random.lognormal(3.6, 0.8, 2).astype(int) + 1, 250)
            starts = random.integers(len(words) - 250, size=2)
            texts = [" ".join(words[i : i + n]) for i, n in zip(starts, sizes, strict=True)]
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), texts, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(folder: Path, text: str) -> None:
    """Write a byte-level BPE of ``text`` with a chat template."""
    from tokenizers import Tokenizer

    from megatron.training.preprocess.documents import RecordFormat
    from megatron.training.preprocess.train import TrainingOptions, train_bpe

    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": line}) + "\n" for line in text.splitlines()))
    options = TrainingOptions(
        input=str(corpus),
        output_dir=str(folder),
        record_format=RecordFormat(),
        vocab_size=4000,
    )
    train_bpe(options)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def step_ours(args: argparse.Namespace) -> list[list[float]]:
    """Return the tokens and the CPU seconds of each step."""
    import pretrain_gpt
    from megatron.core.enums import ModelType
    from megatron.training.callbacks import Callback
    from megatron.training.training import pretrain

    packs = args.worker == OURS[0]
    total = args.steps + WARMUP
    folder = args.folder
    began: list[float] = []
    seconds: list[float] = []
    counts: list[int] = []

    class Clock(Callback):
        def on_step_start(self, run: Any) -> None:
            began.append(time.process_time())

        def on_step_end(self, run: Any, result: Any) -> None:
            seconds.append(time.process_time() - began[-1])

    def provider(sizes: Any) -> Any:
        train, *others = pretrain_gpt.train_valid_test_datasets_provider(sizes)
        for step in range(total):
            rows = [train[i] for i in range(step * args.rows, (step + 1) * args.rows)]
            # A conversation of n tokens takes n - 1 positions.
            tokens = sum(int((~r["is_padding"]).sum()) for r in rows)
            counts.append(tokens + sum(int((r["position_ids"] == 0).sum()) for r in rows))
        return train, *others

    provider.is_distributed = True  # type: ignore[attr-defined]
    sys.argv = ["pretrain_gpt.py", *flags_of_ours(args, folder, total)]
    if not packs:
        sys.argv.append("--no-sft-packing")
    pretrain(
        provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        args_defaults={"model_kind": "gpt"},
        callbacks=[Clock()],
    )
    return [[n, s] for n, s in zip(counts, seconds, strict=True)]


def flags_of_ours(args: argparse.Namespace, folder: Path, total: int) -> list[str]:
    return (
        f"--device cpu --use-checkpoint-args --load {folder / 'ours'} --finetune --sft "
        f"--tokenizer-model {folder / 'model'} --train-data-path {folder / 'chats.jsonl'} "
        f"--data-cache-path {folder / 'cache'} --seq-length {args.seq_length} "
        f"--micro-batch-size {args.rows} --global-batch-size {args.rows} --train-iters {total} "
        "--lr 1e-5 --lr-decay-style constant --weight-decay 0 --clip-grad 1 --eval-iters 0 "
        f"--num-workers 0 --log-interval 1000 {BF16 if args.dtype == 'bf16' else ''}"
    ).split()


def step_trl(args: argparse.Namespace) -> list[list[float]]:
    """Return the tokens and the CPU seconds of each step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    folder = args.folder
    rows = [json.loads(line) for line in (folder / "chats.jsonl").open()]
    began: list[float] = []
    found: list[list[float]] = []
    counts: list[int] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **named: Any) -> None:
            began.append(time.process_time())

        def on_step_end(self, *args: Any, **named: Any) -> None:
            found.append([sum(counts), time.process_time() - began[-1]])
            counts.clear()

    class Trainer(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            counts.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
            return super().compute_loss(model, inputs, *args, **named)

    is_packed = args.worker == TRL[0]
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=args.dtype == "bf16",
        max_steps=args.steps + WARMUP,
        per_device_train_batch_size=1 if is_packed else args.rows,
        gradient_accumulation_steps=args.rows if is_packed else 1,
        assistant_only_loss=True,
        max_length=args.seq_length,
        packing=is_packed,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        model_init_kwargs={"dtype": "float32"},
    )
    Trainer(
        model=str(folder / "model"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    ).train()
    return found


if __name__ == "__main__":
    main()
