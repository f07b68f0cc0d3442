"""Sentences for flags that this version refuses or takes without effect.

A feature that is added later deletes its line here and the ``refused=`` or ``ignored=`` that names
it.  A sentence follows the flag: "--flag value: <sentence>" or "--flag is without effect: ...".
"""

from __future__ import annotations


def only_with(flag: str) -> str:
    """For a flag that adjusts a feature which is refused by its own flag."""
    return f"it only adjusts {flag}, which is not in this version"


# ---- refused: not in this version ----------------------------------------------------------
TP_OVERLAP = (
    "overlap of tensor-parallel communication through Transformer Engine's buffers is not in this "
    "version; drop the flag"
)
IN_MEMORY = (
    "a checkpoint in memory ends with the process, and there is no restart inside the process; "
    "use --non-persistent-ckpt-type local with --replication"
)
ZARR = "zarr is a format of the past, which Megatron-LM does not write either: use torch_dist"
RETRO = "retrieval-augmented models are not in this version; drop the flag"
SERVING = "dynamic batching is not in this version; drop the flag"
MULTIMODAL = "models of images and text are not in this version; drop the flag"
SFT = "fine-tuning on conversations is not in this version; drop the flag"
RERUN = (
    "re-running a suspicious step is not in this version; drop the flag: a NaN loss or gradient "
    "stops the run and names step and rank"
)
RESTART = (
    "restart inside the process is not in this version; drop the flag: torchrun --max-restarts "
    "starts the whole job again"
)
FT_PACKAGE = "the fault-tolerance package is not used in this version; drop the flag"

# ---- refused: not part of this project -----------------------------------------------------
LEGACY_MODELS = "the legacy models are not part of this project; drop the flag"
VISION = "vision classification, inpainting and DINO are not part of this project; drop the flag"
RETRIEVER = "ICT and REALM retrieval models are not part of this project; drop the flag"
KITCHEN = "the kitchen package is not public and not part of this project; drop the flag"

# ---- without effect ------------------------------------------------------------------------
NO_KERNEL = "kernels are chosen by what runs here; the result does not depend on the choice"
OLD_SPELLING = "the reference does nothing with it either"
ONE_LOGGER = "nothing is ever reported to one logger here"
ALWAYS_SO = "it is always so here"
EVERY_STEP = "fp8 scaling factors are renewed in every step, as there"
