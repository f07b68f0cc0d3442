"""Supervised fine-tuning on conversations (--sft)."""
