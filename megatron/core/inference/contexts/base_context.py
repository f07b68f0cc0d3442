"""What the contexts of Megatron-LM's engines have in common."""

from __future__ import annotations

import abc


class BaseInferenceContext(abc.ABC):
    """Base class of contexts.

    ``materialize_only_last_token_logits``: compute logits of the last token of a sequence only.
    """

    def __init__(self, materialize_only_last_token_logits: bool) -> None:
        self.materialize_only_last_token_logits = materialize_only_last_token_logits
        self.sequence_len_offset = 0
        self.batch_size_offset = 0

    @abc.abstractmethod
    def is_static_batching(self) -> bool:
        """Return whether all sequences of the batch grow together."""

    def is_dynamic_batching(self) -> bool:
        """Return whether requests join and leave a running batch."""
        return not self.is_static_batching()

    def increment_sequence_len_offset(self, increment: int) -> None:
        """Count the tokens of a finished forward pass."""
        self.sequence_len_offset += increment

    def increment_batch_size_offset(self, increment: int) -> None:
        """Note how many sequences of the batch earlier micro-batches had."""
        self.batch_size_offset += increment

    def reset_batch_size_offset(self) -> None:
        """Begin with the first sequence of the batch again."""
        self.batch_size_offset = 0
