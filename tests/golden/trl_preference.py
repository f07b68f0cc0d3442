"""Write trl_preference.json: losses of TRL's DPOTrainer and RewardTrainer, the judges of our own.

python tests/golden/trl_preference.py [in an environment with trl, transformers and datasets]
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
WORDS = (
    "<pad> <eos> the cat sat on a mat dog ran to red house and then slept why not blue sky is"
).split()
ROWS = [
    ("why the cat ran", " to the house", " on a dog"),
    ("the sky is", " blue", " red and then the dog sat on the mat"),
    ("a dog", " slept on the red mat and then ran", " is not"),
    ("then", " the cat", " why not the blue house"),
]
STEPS = 4
COMPARED = (
    "loss grad_norm rewards/chosen rewards/rejected rewards/margins rewards/accuracies "
    "margin accuracy"
).split()
BETA = 0.3


def tiny_llama(name: str = "LlamaForCausalLM", **more: Any) -> Any:
    """Return the model that both sides train; its weights follow from the seed."""
    import transformers
    from transformers import LlamaConfig

    torch.manual_seed(5)
    return getattr(transformers, name)(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.3,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            **more,
        )
    )


def save_tokenizer(folder: Path) -> Any:
    """Write a tokenizer whose tokens are words, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return what is compared of each step."""
    steps = [log for log in trainer.state.log_history if "loss" in log]
    return [{name: step[name] for name in COMPARED if name in step} for step in steps]


def main() -> None:
    import trl
    from datasets import Dataset

    found: dict[str, Any] = {
        "versions": {
            name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")
        }
    }
    rows = Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ROWS])
    common = dict(
        per_device_train_batch_size=len(ROWS),
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        max_length=64,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    for kind in ("sigmoid", "ipo", "hinge"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl.DPOTrainer(
                model=tiny_llama(),
                ref_model=tiny_llama(),
                args=trl.DPOConfig(output_dir=folder, beta=BETA, loss_type=[kind], **common),
                train_dataset=rows,
                processing_class=save_tokenizer(Path(folder)),
            )
            trainer.train()
            found[kind] = logged(trainer)
    with tempfile.TemporaryDirectory() as folder:
        reward = trl.RewardTrainer(
            model=tiny_llama("LlamaForSequenceClassification", num_labels=1),
            args=trl.RewardConfig(output_dir=folder, **common),
            train_dataset=rows,
            processing_class=save_tokenizer(Path(folder)),
        )
        reward.train()
        found["reward"] = logged(reward)
    (HERE / "trl_preference.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
