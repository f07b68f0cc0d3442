"""RETRO: a GPT whose tokens attend to neighbors that were retrieved for earlier chunks."""

from .attention import get_retro_decoder_block_spec as get_retro_decoder_block_spec
from .config import RetroConfig as RetroConfig
from .model import RetroModel as RetroModel
