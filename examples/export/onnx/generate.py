"""Generate greedily with a model that tools/checkpoint/convert.py --format onnx has written.

    python examples/export/onnx/generate.py --model DIR --prompt-ids 5 17 3 --num-tokens 64

Needs onnxruntime and numpy alone: neither torch nor this project.  `generate` is for GPT, and
`generate_from` for T5, whose encoder reads the prompt.  One graph processes the prompt, with a past
of length 0, and then one token at a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

PAST = "past_key_values."


def generate(session: Any, ids: Any, num_tokens: int, mask: Any = None) -> Any:
    """Append ``num_tokens`` tokens to the prompts ``ids`` [b, s].

    ``mask`` [b, s] is 0 for padding, which precedes a prompt.
    """
    mask = np.ones_like(ids) if mask is None else mask
    past = empty_past(session, len(ids))
    new = ids
    for _ in range(num_tokens):
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -new.shape[1] :]
        inputs = {"input_ids": new, "attention_mask": mask, "position_ids": positions}
        logits, past = run(session, inputs, past)
        new = logits[:, -1:].argmax(-1)
        ids = np.concatenate([ids, new], 1)
        mask = np.concatenate([mask, np.ones_like(new)], 1)
    return ids


def generate_from(encoder: Any, decoder: Any, ids: Any, num_tokens: int, start: int = 0) -> Any:
    """Return ``num_tokens`` tokens of the decoder for the encoder's ``ids`` [b, s]."""
    mask = np.ones_like(ids)
    (states,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    past = empty_past(decoder, len(ids))
    out = np.full((len(ids), 1), start)
    for _ in range(num_tokens):
        inputs = {
            "input_ids": out[:, -1:],
            "encoder_attention_mask": mask,
            "encoder_hidden_states": states,
        }
        logits, past = run(decoder, inputs, past)
        states = states[:, :0]  # the past holds its keys and values now
        out = np.concatenate([out, logits[:, -1:].argmax(-1)], 1)
    return out[:, 1:]


def run(session: Any, inputs: Any, past: Any) -> Any:
    """Return the logits [b, s, v] and the past for the next tokens."""
    logits, *present = session.run(None, inputs | past)
    return logits, dict(zip(past, present, strict=True))


def empty_past(session: Any, rows: int) -> Any:
    """Return keys and values of no tokens: [b, heads, 0, width]."""
    return {
        each.name: np.zeros((rows, each.shape[1], 0, each.shape[3]), np.float32)
        for each in session.get_inputs()
        if each.name.startswith(PAST)
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--prompt-ids", type=int, nargs="+", required=True, help="tokens")
    parser.add_argument("--num-tokens", type=int, default=64, help="tokens to generate")
    args = parser.parse_args()
    import onnxruntime

    ids = np.array([args.prompt_ids])

    def load(name: str) -> Any:
        path = str(args.model / name)
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    if (args.model / "encoder_model.onnx").exists():
        sessions = load("encoder_model.onnx"), load("decoder_model.onnx")
        out = generate_from(*sessions, ids, args.num_tokens)
    else:
        out = generate(load("model.onnx"), ids, args.num_tokens)[:, ids.shape[1] :]
    print(*out[0])


if __name__ == "__main__":
    main()
