"""Tokens to text one by one: nothing is lost, split or decoded over and over."""

from __future__ import annotations

import random

import pytest
import tokenizers

from rm_abstract.server.text import Detokenizer

WORDS = [
    "a",
    " be",
    "see",
    "\n",
    "é",
    " 日本",
    "🙂",
    "e\N{COMBINING ACUTE ACCENT}",
    " don't",
    "ﷺ",
    "  x",
]


class Counting:
    """Tokenizers' `decode` with the arguments that transformers' has."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.decoded, self.longest = tokenizer, 0, 0

    def decode(self, ids, skip_special_tokens=False):
        self.decoded += 1
        self.longest = max(self.longest, len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def bytes_alone():
    """Every byte is a token, as in byte-level BPE without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(["<end>"])
    return found


def words_with_spaces():
    """Words begin with a mark that is a space, but for the first of a text."""
    pieces = ["▁" + word.strip() for word in WORDS if word.strip()] + list("abcdexé日本語🙂'ﷺ")
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(["<end>", *pieces]))}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<end>"))
    found.decoder = tokenizers.decoders.Metaspace()
    found.add_special_tokens(["<end>"])
    return found


@pytest.mark.parametrize("make", [bytes_alone, words_with_spaces])
def test_the_text_of_tokens_that_come_one_by_one_is_that_of_all_at_once(make, seed: int) -> None:
    draw, tokenizer = random.Random(seed), make()
    for length in [0, 1, 2, 7, 8, 9, 50, 200]:
        if make is bytes_alone:
            text = "".join(draw.choice(WORDS) for _ in range(length))
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        else:
            ids = [draw.randrange(1, tokenizer.get_vocab_size()) for _ in range(length)]
        end = tokenizer.token_to_id("<end>")
        for place in sorted(draw.choices(range(len(ids) + 1), k=length // 10), reverse=True):
            ids.insert(place, end)
        words = Detokenizer(Counting(tokenizer))
        parts = [words.add(token) for token in ids]
        assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)
        assert "".join(parts) + words.rest() == tokenizer.decode(ids, skip_special_tokens=True)
        assert words.rest() == ""


def test_an_unfinished_character_comes_out_at_the_end_alone() -> None:
    tokenizer = bytes_alone()
    ids = tokenizer.encode("ab🙂", add_special_tokens=False).ids[:-1]
    words = Detokenizer(Counting(tokenizer))
    assert "".join(words.add(token) for token in ids) == "ab"
    assert words.rest() == "\N{REPLACEMENT CHARACTER}"


def test_a_token_is_decoded_about_once_and_with_few_others() -> None:
    counting = Counting(bytes_alone())
    words = Detokenizer(counting)
    for _ in range(100):
        for token in counting._tokenizer.encode("abcdefghij", add_special_tokens=False).ids:
            words.add(token)
    assert counting.decoded < 1300 and counting.longest <= 8
