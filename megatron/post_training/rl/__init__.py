"""Reinforcement learning: rollouts by the engine in process, rewards, the GRPO loss."""
