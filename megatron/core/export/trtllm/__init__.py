"""Checkpoints of TensorRT-LLM: config.json and the weights of each rank.

NVIDIA deprecates this path: current versions of TensorRT-LLM load Hugging Face folders.
"""
