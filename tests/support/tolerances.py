"""How far two numbers may lie apart: written once, never loosened for a feature.

Use as ``torch.testing.assert_close(actual, expected, **tolerances.of(dtype))``.
"""

from __future__ import annotations

import torch

# Same mathematics, other order of sums, small sizes: forward values and gradients.
DTYPE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}

# Gradients of a whole fp32 model against another implementation of it.
GRADIENT = {"rtol": 1e-4, "atol": 1e-6}

# Losses of one run in two parallel layouts, fp32, no dropout, up to 50 steps.
LAYOUT_LOSS = {"rtol": 1e-5, "atol": 1e-5}

# Any layout against one process, no dropout, three steps.  Losses and norms relative to themselves;
# the difference of a gradient relative to max(its norm, 1e-6 of the global norm); weights absolute.
# What is further off in fp32 must be within the line of fp64; 16-bit runs are
# compared with one process of the same precision, whose sums are rounded elsewhere.
LAYOUT = {
    torch.bfloat16: {"loss": 5e-3, "norm": 2e-2, "gradient": 6e-2, "weight": 2e-2},
    torch.float16: {"loss": 1e-3, "norm": 5e-3, "gradient": 2e-2, "weight": 5e-3},
    torch.float32: {"loss": 1e-6, "norm": 1e-6, "gradient": 1e-5, "weight": 1e-6},
    torch.float64: dict.fromkeys(("loss", "norm", "gradient", "weight"), 1e-11),
}

# A gradient of a 16-bit layout beyond its line: its error against fp64 in errors of one 16-bit
# process against fp64.  Both are rounded as often, elsewhere, and the layouts agree in fp64.  Of 45
# layouts the largest is 1.7.
ROUNDINGS = 2

# The same where products have codes and the layout cuts what shares a scale.  Those of fp8 are
# powers of two: another one rounds otherwise only what lies 2^-14 below the largest value, by 2^-18
# of that.  One of some thousand values is then perhaps moved to the next code, 2^-4 of it away,
# and a norm is some thousandths off after three steps.
# Those of nvfp4 are any numbers, and gradients are rounded at random by place: its own error, of
# which sums over tokens leave about a fifth.
LAYOUT_OF_FP8 = {"loss": 1e-4, "norm": 5e-3, "gradient": 2e-3, "weight": 1e-3}
# In 16 bits, whose sums are rounded elsewhere, 2^-5 of all are: sqrt(2^-5) * 2^-4 = 1e-2 of each
# operand of each layer.
LAYOUT_OF_FP8_IN_16_BITS = {"loss": 1e-2, "norm": 6e-2, "gradient": 0.2, "weight": 3e-2}
LAYOUT_OF_NVFP4 = {"loss": 5e-3, "norm": 0.1, "gradient": 0.5, "weight": 3e-2}

# Whether a token is beyond the capacity of an expert is decided by scores, in 16 bits by their
# rounding.  One that falls otherwise is a share of some tens of its expert's gradient.
LAYOUT_OF_CAPACITY_IN_16_BITS = {"loss": 5e-3, "norm": 2e-2, "gradient": 0.2, "weight": 2e-2}

# With moments of fewer bits: where the upper half of a parameter is another its noise is, and the
# last bit of a moment of 8, an eighth of a step.
LAYOUT_OF_ROUNDED_STATE = {"loss": 1e-4, "norm": 1e-4, "gradient": 1e-5, "weight": 4e-3}

# Logits of one fp32 model against another implementation of it.
LOGITS = {"rtol": 1e-5, "atol": 1e-5}

# The same kind of run on one device type, one layout: every bit.
BITWISE = {"rtol": 0.0, "atol": 0.0}


def of(dtype: torch.dtype) -> dict[str, float]:
    """Keyword arguments of `torch.testing.assert_close` for values of ``dtype``."""
    return DTYPE[dtype]
