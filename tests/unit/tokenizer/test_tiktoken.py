"""TikTokenizer: ranks after the special tokens, three spellings of the file."""

from __future__ import annotations

import base64
import json

import pytest
import tiktoken

from megatron.core.config.errors import ConfigError
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.tiktoken import PATTERN_TIKTOKEN_V1, PATTERN_TIKTOKEN_V2

TOKENS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"in", b"ing"]
SPECIAL = 10
TEXTS = ("the thing in", "", "caf\u00e9 \u4f60\n\n 12345 HelloWorld", "<s> a/b//\n")


def entries():
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(TOKENS)
    ]


def spec(path, **options):
    values = {"vocab_size": len(TOKENS) + SPECIAL, "tiktoken_num_special_tokens": SPECIAL}
    return TokenizerSpec(
        tokenizer_type="TikTokenizer",
        tokenizer_model=str(path),
        **{"tiktoken_pattern": "v2", **values, **options},
    )


@pytest.fixture
def ranks_file(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(entries()))
    return path


@pytest.mark.parametrize(
    ("name", "pattern"), [("v1", PATTERN_TIKTOKEN_V1), ("v2", PATTERN_TIKTOKEN_V2)]
)
def test_ids_are_the_ranks_of_tiktoken_after_the_special_tokens(ranks_file, name, pattern):
    tokenizer = create_tokenizer(spec(ranks_file, tiktoken_pattern=name))
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    owner = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert ids == [SPECIAL + rank for rank in owner.encode_ordinary(text)]
        assert tokenizer.detokenize(ids) == text
    batch = tokenizer.tokenize_batch(TEXTS)
    assert batch.ids.tolist() == [i for text in TEXTS for i in tokenizer.tokenize(text)]


def test_the_special_tokens_come_first_and_are_filled_up(ranks_file):
    tokenizer = create_tokenizer(spec(ranks_file))
    first = [tokenizer.inv_vocab[i] for i in range(SPECIAL)]
    assert first == [
        *("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"),
        *("<SPECIAL_7>", "<SPECIAL_8>", "<SPECIAL_9>"),
    ]
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 2, 4)
    assert tokenizer.eod == tokenizer.eos
    assert tokenizer.vocab_size == len(TOKENS) + SPECIAL == len(tokenizer.vocab)
    assert tokenizer.tokenize("in", bos=True, eos=True) == [1, *tokenizer.tokenize("in"), 2]


def test_fewer_ids_than_ranks_keep_the_first_ranks(ranks_file):
    tokenizer = create_tokenizer(spec(ranks_file, vocab_size=SPECIAL + 258))
    assert tokenizer.vocab_size == SPECIAL + 258
    assert tokenizer.tokenize("the") == [SPECIAL + 257]
    assert len(tokenizer.tokenize("ing")) == 3


def test_a_tekken_file_and_a_file_of_lines_say_the_same(ranks_file, tmp_path):
    wanted = create_tokenizer(spec(ranks_file)).tokenize(TEXTS[0])
    tekken = tmp_path / "tekken.json"
    tekken.write_text(json.dumps({"vocab": entries(), "config": {}}))
    lines = tmp_path / "ranks.tiktoken"
    lines.write_text("".join(f"{e['token_bytes']} {e['rank']}\n" for e in entries()))
    assert create_tokenizer(spec(tekken)).tokenize(TEXTS[0]) == wanted
    assert create_tokenizer(spec(lines)).tokenize(TEXTS[0]) == wanted


def test_offsets_come_from_tiktoken(ranks_file):
    tokenizer = create_tokenizer(spec(ranks_file))
    assert tokenizer.offsets(tokenizer.tokenize("the in"), "the in") == [0, 3, 4]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tiktoken_pattern": None}, "TikTokenizer needs --tiktoken-pattern"),
        ({"tiktoken_pattern": "v3"}, "--tiktoken-pattern 'v3' is unknown"),
        ({"vocab_size": SPECIAL}, "--vocab-size 10 leaves no id for text"),
        ({"tiktoken_special_tokens": ("<s>", "</s>")}, "--tiktoken-special-tokens <s> </s>: each"),
        ({"tiktoken_num_special_tokens": 3}, "--tiktoken-num-special-tokens 3 is fewer"),
    ],
)
def test_options_that_do_not_fit_are_said_with_their_flags(ranks_file, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        create_tokenizer(spec(ranks_file, **options))


def test_a_file_with_a_hole_in_its_ranks_is_refused(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps([e for e in entries() if e["rank"] != 100]))
    with pytest.raises(ConfigError, match="ranks must follow each other"):
        create_tokenizer(spec(path))
    path.write_text("no ranks")
    with pytest.raises(ConfigError, match="it must be a JSON list of rank"):
        create_tokenizer(spec(path))


def test_a_file_that_lacks_a_byte_is_refused(tmp_path):
    changed = entries()
    changed[7]["token_bytes"] = base64.b64encode(b"not a byte").decode()
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="begin with the 256 bytes"):
        create_tokenizer(spec(path))
