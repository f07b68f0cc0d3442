"""A training application for large transformers, and the library under it."""

from pkgutil import extend_path

# Other distributions have packages here too: megatron.energon.
__path__ = extend_path(__path__, __name__)
