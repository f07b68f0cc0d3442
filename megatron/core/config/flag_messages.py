"""Messages for flags that this version refuses, or accepts without effect.

The commit that implements a flag deletes its message, and the ``refused=`` or ``ignored=`` that
uses it.  Messages are printed after the flag:

    --flag value: <message>
    --flag is without effect: <message>
"""

from __future__ import annotations


def only_with(flag: str) -> str:
    """Return the message of a flag that only configures the feature of ``flag``, a refused one."""
    return f"it only adjusts {flag}, which is not available in this program"


# ---- refused: not in this version ----------------------------------------------------------
ZARR = "zarr is a format of the past, which Megatron-LM does not write either: use torch_dist"
MULTIMODAL = (
    "models of images and text are not available in this program; use a text tokenizer and rope "
    "positions, or Megatron-LM for multimodal models"
)

RADIO = (
    "runs with the encoder RADIO are not available in this program; use clip, siglip, internvit "
    "or qwen3_vl, or build megatron.core.models.vision.radio.RADIOViTModel in a script"
)

# ---- refused: not part of this project -----------------------------------------------------
LEGACY_MODELS = (
    "Megatron-LM's legacy models are not available in this program; use the models of its core "
    "library, which this program builds without a flag"
)
VISION = (
    "inpainting, DINO and Swin are not available in this program; train image classifiers with "
    "pretrain_vision_classify.py, or use pretrain_vision_{inpaint,dino}.py of Megatron-LM"
)
RETRIEVER = (
    "ICT and REALM retrieval models are not available in this program; use tools/bert_embedding.py "
    "for embeddings of a trained BERT, or Megatron-LM"
)
KITCHEN = (
    "the kitchen package is not public and not available in this program; use --fp8-format with "
    "--fp8-recipe, or --fp4-format"
)

# ---- without effect ------------------------------------------------------------------------
GENERATION = (
    "training generates no text; tools/run_text_generation_server.py and "
    "tools/text_generation_cli.py use it"
)
EXAMPLES_DATA = (
    "programs of examples/post_training/modelopt read it; for conversations use --sft --data-path"
)
NO_KERNEL = "this program chooses its kernels itself; results do not depend on the choice"
UNPACKED = "each rollout has a row, as long as the longest one of its round; the loss is the same"
MODEL_OF_ROLLOUTS = "rollouts share the parameters that training holds alike"
OLD_SPELLING = "Megatron-LM does not use it either"
ONE_LOGGER = "this program does not report to one logger"
ALWAYS_SO = "this program always does so"
EVERY_STEP = "fp8 scaling factors are updated in every step, as in Megatron-LM"
