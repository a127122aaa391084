"""Questions and answers one character per word, for tiny models whose tokenizer has a token per word."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from itertools import takewhile

MARKS = {" ": "␣", "\n": "↵", "\t": "⇥", "#": "♯"}  # white space parts words, and words that start with '#' are thoughts
CHARACTERS = tuple(sorted((set(string.printable) - set(string.whitespace) - {"#"}) | set(MARKS.values())))
_READ = {mark: character for character, mark in MARKS.items()}


def spell(text: str) -> tuple[str, ...]:
    """One word per character."""
    return tuple(MARKS.get(character, character) for character in text)


def read(words: str) -> str:
    """The text that was spelled; a word that is no character stays as it is."""
    return "".join(_READ.get(word, word) for word in words.split())


def is_spellable(text: str) -> bool:
    return set(spell(text)).issubset(CHARACTERS)


def shared_frame(questions: Sequence[str]) -> tuple[str, str]:
    """What all questions start with and what all end with, up to the boundary of a word."""
    parts = [re.findall(r"[A-Za-z]+|.", question, re.DOTALL) for question in questions]
    start = _shared_start(parts)
    rests = [words[len(start) :][::-1] for words in parts]
    return "".join(start), "".join(_shared_start(rests)[::-1])


def _shared_start(sequences: Sequence[Sequence[str]]) -> list[str]:
    together = takewhile(lambda column: len(set(column)) == 1, zip(*sequences, strict=False))
    return [column[0] for column in together]
