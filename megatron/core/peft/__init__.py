"""Parameter-efficient fine-tuning: low-rank adapters (LoRA) on a frozen model."""
