"""The library's side: families of questions, their levels, their items and how it scores answers.

Ranges take the highest segment of their level only, so that an item is as hard as its levels say; with the library's
default a high level contains all lower ones.
"""

from __future__ import annotations

import ast
import os
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rla_lightning.types import ConfigError

if TYPE_CHECKING:
    from reasoning_gym.coaching import BaseCurriculum
    from reasoning_gym.dataset import ProceduralDataset

Levels = tuple[tuple[str, int], ...]  # (attribute, level) in the curriculum's order

FULL_SCORE = 1.0 - 1e-9  # wrong answers can score a little
SENSELESS = ("xyzzy", "?")  # must not win
_EVALUATES = "its scorer runs the answer as a program"
REFUSED = {
    "game_of_life_halting": "every answer scores 1.0",
    "simple_integration": _EVALUATES,
    "intermediate_integration": _EVALUATES,
    "polynomial_multiplication": _EVALUATES,
}
# Their scorers, too, run the answer as a program, or take unbounded time for some; right answers need no more than this: no
# names, no powers, no large exponents, no variables but single capitals, of which the library takes its own only.
_ARITHMETIC, _MATRIX = re.compile(r"(?!.*\*\*)[\d\s+\-*/()]{1,400}", re.DOTALL), re.compile(r"[\d\s,\[\]\-]*")
HARMLESS = {
    "binary_matrix": _MATRIX,
    "coin_flip": re.compile(r"\s*-?\d{1,12}(\.\d{1,30}(e-\d{1,2})?|/\d{1,12})?\s*"),
    "countdown": _ARITHMETIC,
    "n_queens": re.compile(r"[Q_\s,\[\]'\"]*"),
    "propositional_logic": re.compile(r"(?!.*[A-Z]{2})[A-Z\s()¬∧∨→↔]{1,400}", re.DOTALL),
    "puzzle24": _ARITHMETIC,
    "spiral_matrix": _MATRIX,
    "string_insertion": re.compile(r"[A-E\s,\[\]'\"]*"),
}
LONGEST_ANSWER = 20_000  # characters
HASH_DEPENDENT = ("isomorphic_strings", "ransom_note")


@dataclass(frozen=True)
class Item:
    """One question."""

    question: str
    answer: str | None  # None where several are right
    metadata: str  # a Python literal: scoring needs tuples and numbers as keys, which JSON does not keep

    def entry(self) -> dict[str, Any]:
        """What the library scores answers to."""
        return {"question": self.question, "answer": self.answer, "metadata": ast.literal_eval(self.metadata)}


def curricula() -> Mapping[str, type[BaseCurriculum]]:
    """The curricula of all families that have one."""
    try:
        from reasoning_gym.factory import CURRICULA  # noqa: PLC0415 (an optional extra)
    except ImportError as error:
        raise ConfigError(
            f"environment 'reasoning_gym' needs the package reasoning-gym ({error}): pip install 'rla_lightning[reasoning-gym]'"
        ) from error
    return CURRICULA  # type: ignore[return-value]


def check_families(names: Iterable[str]) -> None:
    """Raise one ConfigError that names every family that cannot be used, and why."""
    known = curricula()
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    problems = []
    for name in names:
        if name in REFUSED:
            problems.append(f"{name!r} ({REFUSED[name]})")
        elif name in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
            problems.append(f"{name!r} (draws other items in every process: set PYTHONHASHSEED, to 0 for example)")
        elif name not in DATASETS:
            near = get_close_matches(name, known, n=3)
            problems.append(f"{name!r} (unknown{'; near are ' + ', '.join(near) if near else ''})")
        elif name not in known:
            problems.append(f"{name!r} (has no levels)")
    if problems:
        raise ConfigError(f"reasoning_gym: families cannot be used: {', '.join(problems)}")


@lru_cache(maxsize=256)
def last_levels(family: str) -> Levels:
    """The highest level of each attribute."""
    attributes = curricula()[family]().attributes.values()
    # An interval from one level to the next: the last two levels would mean the same.
    counts = [len(a.levels) - _is_interval(a) for a in attributes]
    return tuple((a.name, max(count, 1) - 1) for a, count in zip(attributes, counts, strict=True))


@lru_cache(maxsize=4096)
def is_possible(family: str, levels: Levels) -> bool:
    """Whether the family's own validation admits the levels: some combinations it does not."""
    try:
        config = _config(family, levels)
        config.validate()
    except (AssertionError, ValueError):
        return False
    except AttributeError:  # two families validate nothing
        return True
    return True


@lru_cache(maxsize=4096)
def draw_item(family: str, levels: Levels, seed: int) -> Item:
    """The item of a seed; raises whatever the library raises where it finds none."""
    dataset = _dataset(family, levels)
    dataset.seed = seed
    state = random.getstate(), np.random.get_state()
    try:
        entry = dataset[0]
    finally:  # some families seed the generators that everybody shares
        random.setstate(state[0])
        np.random.set_state(state[1])
    return Item(entry["question"], entry["answer"], repr(_plain(entry["metadata"])))


def score(family: str, levels: Levels, item: Item, answer: str) -> float:
    """The library's score of an answer; 0 where its scorer fails on the text, as several do, or would run it."""
    harmless = HARMLESS.get(family)
    if len(answer) > LONGEST_ANSWER or (harmless is not None and not harmless.fullmatch(answer)):
        return 0.0
    try:
        return float(_dataset(family, levels).score_answer(answer, item.entry()))
    except Exception:  # anything: it parses what a model wrote. Right answers are known to be scored, see `item_problem`
        return 0.0


@lru_cache(maxsize=4096)
def item_problem(family: str, levels: Levels, item: Item) -> str | None:
    """Why an item cannot be used: its own answer must win, and senseless ones must not."""
    if item.answer is not None and score(family, levels, item, item.answer) < FULL_SCORE:
        return f"The answer {item.answer[:80]!r} of {family} does not win."
    winning = [text for text in SENSELESS if score(family, levels, item, text) >= FULL_SCORE]
    return f"The answer {winning[0]!r} to {family} wins." if winning else None


def _is_interval(attribute: Any) -> bool:
    from reasoning_gym.coaching import RangeAttributeDefinition  # noqa: PLC0415

    return (
        isinstance(attribute, RangeAttributeDefinition)
        and attribute.ensure_interval
        and not isinstance(attribute.levels[0], Iterable)
    )


def _config(family: str, levels: Levels) -> Any:
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode  # noqa: PLC0415

    curriculum = curricula()[family]()
    for attribute, level in levels:
        curriculum.set_attr_level(attribute, level)
    context = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
    return curriculum.generate_configuration({"seed": 0, "size": 1}, context)


@lru_cache(maxsize=64)
def _dataset(family: str, levels: Levels) -> ProceduralDataset:
    """Kept, because some read a whole dictionary when they are built."""
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    return DATASETS[family][0](config=_config(family, levels))  # type: ignore[call-arg]


def _plain(value: Any) -> Any:
    """The same with numpy's scalars as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(part) for part in value)
    return value
