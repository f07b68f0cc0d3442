"""T5: an encoder, and a decoder that attends to its output."""

from megatron.core.models.T5.t5_model import T5Model as T5Model
