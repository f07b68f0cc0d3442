"""Compare training speed of a vision-language model on the CPU with transformers' LLaVA.

    python benchmarks/train_vlm.py --dtype fp32 --threads 2

The same weights, images and texts; see benchmarks/train_cpu.py for how contenders alternate.  The
row of a contender is void if its losses differ by more than 0.5 % from ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import resource

import torch

from benchmarks.peers import ADAM, CLIP, WEIGHT_DECAY, adamw
from benchmarks.train_cpu import loss_gap, measure

BATCH = 4
TEXT = 128
SIDE = 112
PATCH = 14
VOCABULARY = 8192
IMAGE = 8000
NUM_IMAGE = (SIDE // PATCH) ** 2
VISION = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
LANGUAGE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
STEPS_FOR_LOSSES = 20


def theirs() -> torch.nn.Module:
    """Return transformers' model, from which ours takes its weights."""
    import transformers

    torch.manual_seed(1)
    vision = transformers.CLIPVisionConfig(
        **VISION, intermediate_size=4 * VISION["hidden_size"], image_size=SIDE, patch_size=PATCH
    )
    text = transformers.LlamaConfig(
        **LANGUAGE,
        intermediate_size=1408,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config).train()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images [b, 3, H, W] and texts [b, s + 1]; an image stands before each text."""
    random = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(BATCH, 3, SIDE, SIDE, generator=random),
            torch.randint(0, IMAGE, (BATCH, TEXT + 1), generator=random),
        )
        for _ in range(count)
    ]


class TheirTrainer:
    """An ordinary loop with torch's fused AdamW and autocast."""

    def __init__(self, dtype: str) -> None:
        from megatron.core.device import cpu_tuning

        cpu_tuning.choose_float32_products(LANGUAGE["hidden_size"])  # as ours does in its setup
        self.model = theirs()
        self.optimizer = adamw(self.model)
        self.data = batches(STEPS_FOR_LOSSES)
        self.at = 0
        self.is_bf16 = dtype == "bf16"

    def step(self) -> float:
        images, text = self.data[self.at % len(self.data)]
        self.at += 1
        places = torch.full((BATCH, NUM_IMAGE), IMAGE)
        ids = torch.cat([places, text[:, :-1]], 1)
        labels = torch.cat([torch.full((BATCH, NUM_IMAGE), -100), text[:, :-1]], 1)
        labels[:, NUM_IMAGE] = -100  # what an image predicts does not count
        context = torch.autocast("cpu", torch.bfloat16) if self.is_bf16 else nullcontext()
        with context:
            loss = self.model(input_ids=ids, pixel_values=images, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class OurTrainer:
    """`train_step` of pretrain_vlm.py on the same weights and batches."""

    def __init__(self, dtype: str) -> None:
        import pretrain_vlm
        from benchmarks import ours

        words = (
            f"--model-kind vlm --device cpu --num-layers {LANGUAGE['num_hidden_layers']} "
            f"--hidden-size {LANGUAGE['hidden_size']} --ffn-hidden-size 1408 --num-attention-heads "
            f"{LANGUAGE['num_attention_heads']} --swiglu --normalization RMSNorm --norm-epsilon "
            "1e-6 --position-embedding-type rope --disable-bias-linear "
            "--untie-embeddings-and-output-weights --vision-model-type clip --vision-num-layers "
            f"{VISION['num_hidden_layers']} --vision-hidden-size {VISION['hidden_size']} "
            f"--vision-num-attention-heads {VISION['num_attention_heads']} --img-h {SIDE} --img-w "
            f"{SIDE} --patch-dim {PATCH} --disable-vision-class-token --seq-length {TEXT} "
            f"--micro-batch-size {BATCH} --global-batch-size {BATCH} --train-iters 1000000 --lr "
            f"{ADAM['lr']} --lr-decay-style constant --adam-beta1 {ADAM['betas'][0]} --adam-beta2 "
            f"{ADAM['betas'][1]} --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP} --mock-data "
            f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --hidden-dropout 0 "
            "--make-vocab-size-divisible-by 1 --attention-dropout 0 --eval-iters 0 --num-workers 0"
        ).split()
        argv = words + (["--bf16"] if dtype == "bf16" else [])
        self.run = ours.training_run(argv, pretrain_vlm, copy_weights)
        from megatron.core.rerun.state_machine import RerunDataIterator

        self.run.data.train = RerunDataIterator(endless())

    def step(self) -> float:
        from megatron.training.step.train_step import train_step

        result = train_step(self.run)
        self.run.state.advance(result, 0)
        return float(result.losses["lm loss"])


@torch.no_grad()
def copy_weights(model: torch.nn.Module) -> None:
    """Copy the weights of transformers' model, as the conversion of folders does."""
    from megatron.core.params.param_info import info_of
    from megatron.training.conversion.lazy import as_lazy
    from megatron.training.conversion.vision_language import import_tensors, shape_of_config

    hf = theirs()
    shape = shape_of_config(hf.config.to_dict())
    found = import_tensors(shape, as_lazy(hf.state_dict()))
    for param in model.parameters():
        param.copy_(found[info_of(param).name].make())


def endless() -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches in the form of the data loader."""
    while True:
        for images, text in batches(STEPS_FOR_LOSSES):
            image = torch.full((BATCH, 1), -200)
            num_tiles = torch.zeros(BATCH, TEXT + 1, dtype=torch.int64)
            num_tiles[:, 0] = 1
            loss_mask = torch.ones(BATCH, TEXT + 1)
            loss_mask[:, [0, -1]] = 0
            yield {
                "tokens": torch.cat([image, text[:, :-1]], 1),
                "labels": text,
                "loss_mask": loss_mask,
                "position_ids": torch.arange(TEXT + 1).expand(BATCH, -1).contiguous(),
                "num_tiles": num_tiles,
                "images": images,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=4, help="steps of one turn")
    parser.add_argument("--compared", type=int, default=20, help="steps whose losses must agree")
    parser.add_argument("--shape", default="llava", help=argparse.SUPPRESS)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args)
        return
    found = measure(args, ("ours", "transformers"), __file__)
    ours = statistics.median(found["ours"]["step_s"])
    print(f"LLaVA, {args.dtype}, {args.threads} thread(s), median of a step")
    for name, f in found.items():
        step_s = statistics.median(f["step_s"])
        gap = loss_gap(found["ours"]["losses"], f["losses"])
        valid = "ok" if gap <= 0.005 else "VOID"
        print(
            f"{name:14} {1000 * step_s:8.1f} ms  ours/it {ours / step_s:6.3f}  peak "
            f"{f['peak_mib'][0]:6.0f} MiB  {valid} ({100 * gap:.3f} %)"
        )


def serve(args: argparse.Namespace) -> None:
    """Run one turn of steps for every line on stdin."""
    torch.set_num_threads(args.threads)
    trainer = (OurTrainer if args.worker == "ours" else TheirTrainer)(args.dtype)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    for _ in sys.stdin:
        step_s = []
        losses = []
        for _ in range(args.steps):
            started_at_s = clock()
            losses.append(trainer.step())
            step_s.append(clock() - started_at_s)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"step_s": step_s, "losses": losses, "peak_mib": peak_mib}), flush=True)


if __name__ == "__main__":
    main()
