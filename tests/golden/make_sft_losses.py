"""Write sft_losses.json: masks, loss and gradients of TRL's SFTTrainer and of transformers.

Needs trl, in an environment of its own: python -m tests.golden.make_sft_losses
The model is a Llama with weights of a formula, the data are the conversations below.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.chat_templates import write_chat_tokenizer

GOLDEN = Path(__file__).with_name("sft_losses.json")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = [
    ["What is the answer?", "It is forty-two."],
    ["Speak.", "First Citizen: You are all resolved rather to die than to famish?", "Who?", "All."],
    ["Name a city\nin Italy", "Rome, Milan or Verona."],
    ["Why?", "Because the people know it well, and the gods know it too."],
    ["One", "two", "three", "four", "five", "six"],
    ["A question that is much longer than its answer, to make the rows unequal?", "Yes."],
]


def conversations() -> list[list[dict[str, str]]]:
    """Return the messages of each conversation."""
    roles = ("user", "assistant")
    return [
        [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)] for turns in TURNS
    ]


def write_model(folder: Path) -> Path:
    """Write a tiny Llama, its tokenizer and chat template in Hugging Face's layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    write_chat_tokenizer(folder, TEMPLATE, eos="<|im_end|>")
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 64
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for k, (name, weight) in enumerate(model.named_parameters()):
            place = torch.arange(weight.numel(), dtype=torch.float64)
            values = torch.sin(1.7 * place + 0.3 * k).view(weight.shape)
            weight.copy_(1 + 0.1 * values if "norm" in name else 0.15 * values)
    model.save_pretrained(folder)
    return folder


def digest(gradients: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the norm of each gradient and its product with a fixed vector."""
    found = {}
    for name, gradient in sorted(gradients.items()):
        flat = gradient.detach().double().flatten()
        probe = torch.sin(torch.arange(len(flat), dtype=torch.float64))
        found[name] = [float(flat.norm()), float(flat @ probe)]
    return found


def main() -> None:
    """Compute the figures and write the file."""
    import transformers
    import trl

    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name))
        tokens, masks = _encoded(folder)
        content = {
            "command": "python -m tests.golden.make_sft_losses",
            "versions": {
                "python": sys.version.split()[0],
                **{m.__name__: m.__version__ for m in (torch, transformers, trl)},
            },
            "tokens": tokens,
            "masks": masks,
            "transformers": _by_transformers(folder, tokens, masks),
            "trl": _by_trl(folder),
        }
    GOLDEN.write_text(json.dumps(content) + "\n")


def _encoded(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [
        tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        for messages in conversations()
    ]
    return [list(e["input_ids"]) for e in encoded], [list(e["assistant_masks"]) for e in encoded]


def _by_transformers(
    folder: Path, tokens: list[list[int]], masks: list[list[int]]
) -> dict[str, Any]:
    """Return the mean over all trained tokens, one conversation at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = sum(sum(mask[1:]) for mask in masks)
    loss = 0.0
    for ids, mask in zip(tokens, masks, strict=True):
        labels = [
            token if is_trained else -100 for token, is_trained in zip(ids, mask, strict=True)
        ]
        part = model(
            input_ids=torch.tensor([ids]),
            labels=torch.tensor([labels]),
            num_items_in_batch=torch.tensor(total),
        ).loss
        part.backward()
        loss += part.item()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "gradients": digest(gradients)}


def _by_trl(folder: Path) -> dict[str, Any]:
    """Return what one step of SFTTrainer computes, all conversations in one padded batch."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    found: dict[str, Any] = {}

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args, state, control, model=None, **rest):  # type: ignore[no-untyped-def]
            found["gradients"] = digest({n: p.grad for n, p in model.named_parameters()})

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args, **named):  # type: ignore[no-untyped-def]
            loss = super().compute_loss(*args, **named)
            found["loss"] = (loss[0] if isinstance(loss, tuple) else loss).item()
            return loss

    with tempfile.TemporaryDirectory() as output:
        config = SFTConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            max_steps=1,
            per_device_train_batch_size=len(TURNS),
            assistant_only_loss=True,
            max_length=None,
            packing=False,
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            model_init_kwargs={"dtype": "float32"},
        )
        Trainer(
            model=str(folder),
            args=config,
            train_dataset=Dataset.from_list([{"messages": m} for m in conversations()]),
            callbacks=[Watch()],
        ).train()
    return found


if __name__ == "__main__":
    main()
