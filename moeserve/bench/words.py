"""Plain English-like text from a seed. The words are in `words.txt`.

Most words are one token in the vocabularies in use, so that a length in words is close to a length in tokens;
the exact number of tokens is always taken from the server's `usage`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from random import Random

_SENTENCE_WORDS = (8, 14)


def text(num_words: int, *seed: object) -> str:
    """`num_words` words in sentences: the same for equal seed parts, with another beginning for any others."""
    vocabulary = _vocabulary()
    random = Random("/".join(map(str, seed)))
    sentences = []
    while num_words > 0:
        words = random.choices(vocabulary, k=min(num_words, random.randint(*_SENTENCE_WORDS)))
        num_words -= len(words)
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


@cache
def _vocabulary() -> tuple[str, ...]:
    return tuple(files("moeserve.bench").joinpath("words.txt").read_text("utf-8").split())
