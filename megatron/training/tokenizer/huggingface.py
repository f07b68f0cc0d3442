"""HuggingFaceTokenizer: a local directory or ``tokenizer.json`` in Hugging Face's layout.

A plain ``tokenizer.json`` is run by the ``tokenizers`` library directly: ``transformers`` takes
seconds to import and reads the same rules.  Where ``tokenizer_config.json`` names a class that
changes those rules, ``transformers`` builds it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.config.value_types import JsonObject
from megatron.core.optional import require
from megatron.training.tokenizer.base import BpeRules
from megatron.training.tokenizer.library import LibraryTokenizer

_WANTED_BY = "--tokenizer-type HuggingFaceTokenizer"
# Exceptions of transformers on files with values of other types, or nested too deeply.
_DAMAGED = (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError)
# Classes of transformers that use tokenizer.json unchanged.
_PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
_ROLES = ("bos", "eos", "pad", "cls", "sep", "mask")
# Common names of the end-of-text token, for a tokenizer.json without a config.
_COMMON_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eod|>")


Parts = tuple[Any, Any, dict[str, int]]  # library and wrapper, each or None, and role -> id


class TransformersTokenizer(LibraryTokenizer):
    """Tokenizer of Hugging Face files: a ``tokenizers.Tokenizer``, or a wrapper of transformers."""

    def __init__(self, parts: Parts, *tokenizer_paths: str, **tokenizer_options: object) -> None:
        library, self._wrapper, self._tokens = parts
        super().__init__(library, *tokenizer_paths, **tokenizer_options)
        if library is not None:  # files of sentence embedders enable both
            library.no_truncation()
            library.no_padding()

    def tokenize(self, text: str, **options: Any) -> list[int]:
        if self._wrapper is None:
            return super().tokenize(text, **options)
        ids: list[int] = self._wrapper(text, **options).input_ids
        return ids

    def tokenize_plain(self, text: str) -> list[int]:
        return self.tokenize(text, add_special_tokens=False)

    def detokenize(self, ids: Sequence[int], **options: Any) -> str:
        if self._wrapper is None:
            return super().detokenize(ids, **options)
        text: str = self._wrapper.decode(list(ids), **options)
        return text

    def bpe_rules(self) -> BpeRules | None:
        if self._library is None or self._library.model.__class__.__name__ != "BPE":
            return None
        body = self.tokenize_plain("x")
        around = self.tokenize("x")
        starts = [i for i in range(len(around)) if around[i : i + len(body)] == body]
        if len(starts) != 1:
            return None
        prefix, suffix = around[: starts[0]], around[starts[0] + len(body) :]
        rules = json.loads(self._library.to_str())
        rules |= dict.fromkeys(("post_processor", "truncation", "padding"))
        text = json.dumps(rules, ensure_ascii=False)
        return BpeRules(text, tuple(prefix), tuple(suffix), tuple(self.appended_tokens()))

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        found: Mapping[str, int] = (self._wrapper or self._library).get_vocab()
        return found

    @property
    def vocab_size(self) -> int:
        return int(super().vocab_size) if self._wrapper is None else len(self._wrapper)

    def appended_tokens(self) -> Set[str]:
        if self._library is None:
            return set(self._wrapper.get_added_vocab())
        return {token.content for token in self._library.get_added_tokens_decoder().values()}

    def special_ids(self) -> Set[int]:
        if self._library is None:
            return super().special_ids() | {*self._wrapper.all_special_ids}
        added = self._library.get_added_tokens_decoder()
        return super().special_ids() | {i for i, token in added.items() if token.special}

    def get_special_tokens(self) -> Mapping[str, int]:
        """Return the tokens outside of the model, with their ids."""
        return {token: self.vocab[token] for token in self.appended_tokens()}

    @property
    def decoder(self) -> Mapping[int, str]:
        """Id -> token."""
        return self.inv_vocab

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        names = map("<extra_id_{}>".format, itertools.count())
        return [self.vocab[name] for name in itertools.takewhile(self.vocab.__contains__, names)]

    def _special(self, role: str) -> int:
        named = "eos" if role == "eod" else role
        if named not in self._tokens:
            raise self._missing("EOD (it is EOS)" if role == "eod" else role.upper())
        return self._tokens[named]


class _HuggingFaceTokenizer(TransformersTokenizer):
    """Tokenizer defined by its files, including special tokens that they add around a text.

    ``<extra_id_N>`` that the files lack get ids after theirs.
    """

    def __init__(
        self, pretrained_model_name_or_path: str, vocab_extra_ids: int = 0, **options: Any
    ) -> None:
        asked = {"vocab_extra_ids": vocab_extra_ids} if vocab_extra_ids else {}
        path = pretrained_model_name_or_path
        file, config = _local_files(path)
        parts: Parts
        if file is None or options or not _is_plain(config):
            parts = parts_of(load_wrapper(path, options))
        else:
            library = _load_library(file)
            parts = library, None, _tokens_of(config, library)
        super().__init__(parts, path, **asked, **options)
        extra = [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]
        if self._wrapper is not None:
            self._wrapper.add_tokens(extra, special_tokens=True)
        else:
            self._library.add_special_tokens(extra)


def _local_files(path: str) -> tuple[str | None, JsonObject]:
    """Return the tokenizer.json at ``path``, or None, and the configuration beside it.

    The configuration is special_tokens_map.json, overridden by tokenizer_config.json.
    """
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not os.path.isfile(file):
        return None, {}
    config: JsonObject = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            with open(os.path.join(directory, name), encoding="utf-8") as config_file:
                config |= dict(json.load(config_file).items())
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError, AttributeError) as error:  # also a list or a number
            raise ConfigError(f"{directory}/{name} is no JSON: {error}; fetch it again") from error
    return file, config


def _is_plain(config: JsonObject) -> bool:
    changes = ("add_bos_token", "add_eos_token", "auto_map")
    return config.get("tokenizer_class") in _PLAIN_CLASSES and not any(map(config.get, changes))


def _load_library(file: str) -> Any:
    library = require("tokenizers", _WANTED_BY)
    try:
        return library.Tokenizer.from_file(file)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"--tokenizer-model {file}: {error}; it must be a tokenizer.json"
        ) from error


def load_wrapper(path: str, options: Mapping[str, object]) -> Any:
    """Return the tokenizer of transformers that the files at ``path`` define."""
    transformers = require("transformers", _WANTED_BY)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, **{"trust_remote_code": False, **options}
        )
    except _DAMAGED as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--tokenizer-model {path}: {reason}; it must be a directory with the tokenizer's "
            "files, a tokenizer.json, or a name the hub knows"
        ) from error


def parts_of(wrapper: Any) -> Parts:
    """Return the parts of a `TransformersTokenizer` for a tokenizer of transformers."""
    ids = {role: getattr(wrapper, f"{role}_token_id", None) for role in _ROLES}
    tokens = {role: index for role, index in ids.items() if index is not None}
    return wrapper.backend_tokenizer if wrapper.is_fast else None, wrapper, tokens


def _tokens_of(config: JsonObject, library: Any) -> dict[str, int]:
    """Return role -> id, from tokenizer_config.json; without this file, EOS by a common name."""
    if not config:
        found = [i for i in map(library.token_to_id, _COMMON_ENDS) if i is not None]
        return {"eos": found[0]} if found else {}
    tokens: dict[str, int] = {}
    for role in _ROLES:
        named = config.get(f"{role}_token")
        content = named.get("content") if isinstance(named, dict) else named
        index = library.token_to_id(content) if content and isinstance(content, str) else None
        if index is not None:
            tokens[role] = index
    return tokens
