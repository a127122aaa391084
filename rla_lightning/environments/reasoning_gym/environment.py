"""Questions of reasoning-gym as an environment: one question, one answer, scored by the library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.environments.reasoning_gym.families import (
    FULL_SCORE,
    Item,
    Levels,
    check_families,
    draw_item,
    is_possible,
    item_problem,
    last_levels,
    score,
)
from rla_lightning.environments.reasoning_gym.spelling import CHARACTERS, is_spellable, read, shared_frame, spell
from rla_lightning.types import (
    LOST,
    WON,
    ConfigError,
    Direction,
    ExpertAction,
    Observation,
    Split,
    StepLabel,
    Task,
    Transition,
)

OOD_STEPS = 2  # levels that one attribute of an out-of-distribution task is beyond the in-domain ones, at most
MOST_STEPS = 3  # levels that a rewrite moves, all attributes together
TRIES = 20  # draws of an item: a few cannot be made or scored
FRAME_QUESTIONS = 12  # whose common start and end a digest leaves out
LARGEST_LEVEL = 40
CRITIQUES = ("#right", "#unreadable", "#longer", "#shorter", "#other")


class Question(Episode):
    """One question, one answer."""

    max_turns = 1

    def __init__(self, item: Item, family: str, levels: Levels, observation: Observation, spelled: bool) -> None:
        self.item, self.family, self.levels = item, family, levels
        self.observation, self.spelled = observation, spelled

    def is_right(self, answer: str) -> bool:
        return score(self.family, self.levels, self.item, answer) >= FULL_SCORE

    def answer_of(self, action: str) -> str:
        return read(action) if self.spelled else action

    def action_of(self, answer: str) -> str:
        return " ".join(spell(answer)) if self.spelled else answer

    def step(self, action: str) -> Transition:
        if not action:
            return Transition(Observation("There was no answer."), done=True, outcome=LOST, is_valid=False)
        outcome = WON if self.is_right(self.answer_of(action)) else LOST
        return Transition(Observation("The answer is handed in."), done=True, outcome=outcome)  # a judge must not read more


class ReasoningGymEnvironment(Environment):
    """Questions of families like `chain_sum`, with the levels of the library's curricula as knobs.

    Args:
        families: names in reasoning-gym; each needs a curriculum there.
        max_level: highest in-domain level of an attribute; its last level is never in domain where it has more than one.
            Out-of-distribution questions have one attribute 1 or 2 levels beyond.
        spelled: digests and answers have one character per word, for tiny models.
    """

    name = "reasoning_gym"

    def __init__(self, families: Sequence[str], max_level: int = LARGEST_LEVEL, spelled: bool = False) -> None:
        self.families = tuple(families)
        if not self.families:
            raise ConfigError("reasoning_gym: families is empty")
        if not 0 <= max_level <= LARGEST_LEVEL:
            raise ConfigError(f"reasoning_gym: max_level must be from 0 to {LARGEST_LEVEL}, got {max_level}")
        check_families(self.families)
        self.max_level, self.spelled = max_level, spelled
        for family in self.families:
            for split in ("in_domain", "out_of_distribution"):
                self._draw_levels(family, Random(family), 0.0, split)  # refuses what has none
        self._frames = {family: self._frame(family) for family in self.families} if spelled else {}

    # Tasks

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        if not 0 <= difficulty <= 1:
            raise ConfigError(f"reasoning_gym: difficulty must be from 0 to 1, got {difficulty}")
        family = rng.choice(self.families)
        for _ in range(TRIES):
            levels = self._draw_levels(family, rng, difficulty, split)
            task = self._task(family, levels, rng)
            if task is not None:
                return task
        raise ConfigError(
            f"reasoning_gym: {family} gave no usable {split} item in {TRIES} draws at difficulty {difficulty:.2f}: "
            f"change max_level, which is {self.max_level}"
        )

    def start(self, task: Task) -> Question:
        family, item = task.spec["family"], _item_of(task)
        text = f"{item.question.rstrip()}\n\nYour action is the answer alone, in the form that the question asks for."
        digest: tuple[str, ...] = ()
        if self.spelled:
            start, end = self._frames[family]
            digest = (family, *spell(item.question.removeprefix(start).removesuffix(end)))
        return Question(item, family, _levels_of(task), Observation(text, digest=digest), self.spelled)

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> Sequence[Task]:
        """Items 1 to 3 levels away in domain; a held-out task has none."""
        family, levels = task.spec["family"], _levels_of(task)
        tops, step = self._tops(family), 1 if direction == "harder" else -1
        found: dict[str, Task] = {}
        if any(level > tops[attribute] for attribute, level in levels):
            return ()
        for _ in range(2 * number + TRIES):
            if len(found) == number:
                break
            moved = _moved(levels, tops, step * rng.randint(1, MOST_STEPS), rng)
            child = self._task(family, moved, rng, task) if moved != levels and is_possible(family, moved) else None
            if child is not None and child.id != task.id:
                found[child.id] = child
        return tuple(found.values())

    def redraw(self, task: Task, rng: Random) -> Task | None:
        for _ in range(TRIES):
            child = self._task(task.spec["family"], _levels_of(task), rng, task)
            if child is not None and child.id != task.id:
                return child
        return None

    def knobs(self, task: Task) -> Mapping[str, float]:
        return {attribute: float(level) for attribute, level in _levels_of(task)}

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        family, levels = task.spec["family"], _levels_of(task)
        if family not in self.families:
            return f"The family {family!r} is not among those of this environment."
        lasts = dict(last_levels(family))
        if lasts.keys() != dict(levels).keys() or not all(0 <= level <= lasts[attribute] for attribute, level in levels):
            return f"There are no levels {dict(levels)} of {family}."
        if not is_possible(family, levels):
            return f"The library refuses the levels {dict(levels)} of {family}."
        if task.id != _id(family, task.spec["question"]):
            return "The id belongs to another question."
        if parent is not None and parent.id == task.id:
            return "The task equals its parent."
        return item_problem(family, levels, _item_of(task))

    def describe(self, task: Task) -> str:
        return " ".join([task.spec["family"], *(f"{attribute} n{level}" for attribute, level in _levels_of(task))])

    def vocabulary(self) -> tuple[str, ...]:
        attributes = {attribute for family in self.families for attribute, _ in last_levels(family)}
        numbers = {f"n{level}" for level in range(LARGEST_LEVEL + 1)}
        return tuple(sorted({*CHARACTERS, *self.families, *attributes, *numbers, *CRITIQUES}))

    # What is known about answers

    def expert(self, episode: Episode, rng: Random) -> ExpertAction | None:
        """The library's answer; None where it has none, or where it cannot be spelled."""
        question = _question(episode)
        answer = question.item.answer
        if answer is None or (question.spelled and not is_spellable(answer)):
            return None
        return ExpertAction(question.action_of(answer))

    def detour(self, episode: Episode, rng: Random) -> str | None:
        """A wrong answer: that of another question of the same levels, or the right one with a slip."""
        question = _question(episode)
        answer = question.item.answer
        if not answer:
            return None
        for _ in range(TRIES):
            wrong = _slip(answer, rng)
            if rng.random() < 0.5:
                other = self._item(question.family, question.levels, rng)
                wrong = other.answer if other is not None and other.answer else wrong
            readable = wrong.strip() and (not question.spelled or is_spellable(wrong))
            if readable and not question.is_right(wrong):
                return question.action_of(wrong)
        return None

    def label_step(self, episode: Episode, action: str) -> StepLabel | None:
        question = _question(episode)
        given, right = question.answer_of(action), question.item.answer
        if not given:
            return StepLabel(-1, "#unreadable")
        if question.is_right(given):
            return StepLabel(1, "#right")
        if right is None or len(given) == len(right):
            return StepLabel(-1, "#other")
        return StepLabel(-1, "#longer" if len(given) > len(right) else "#shorter")

    # Helpers

    def _tops(self, family: str) -> dict[str, int]:
        """The highest in-domain level of each attribute."""
        return {attribute: min(self.max_level, max(last - 1, 0)) for attribute, last in last_levels(family)}

    def _draw_levels(self, family: str, rng: Random, difficulty: float, split: Split) -> Levels:
        """Levels that add up to what the difficulty says; the nearest sum that the library admits."""
        tops, lasts = self._tops(family), dict(last_levels(family))
        lowest = tuple((attribute, 0) for attribute in tops)
        most = sum(tops.values())
        wanted = round(difficulty * most)
        for total in sorted(range(most + 1), key=lambda total: abs(total - wanted)):
            for _ in range(TRIES):
                levels = _moved(lowest, tops, total, rng)
                if split == "out_of_distribution":
                    beyond = [attribute for attribute in tops if lasts[attribute] > tops[attribute]]
                    if not beyond:
                        raise ConfigError(f"reasoning_gym: {family} has one level only, so nothing is out of distribution")
                    raised = rng.choice(beyond)
                    highest = min(tops[raised] + OOD_STEPS, lasts[raised])
                    levels = _with_level(levels, raised, rng.randint(tops[raised] + 1, highest))
                if is_possible(family, levels):
                    return levels
        raise ConfigError(
            f"reasoning_gym: the library refuses all {split} levels of {family} up to max_level {self.max_level}: raise it"
        )

    def _item(self, family: str, levels: Levels, rng: Random) -> Item | None:
        """A usable item, None where the draw gave none."""
        try:
            item = draw_item(family, levels, rng.getrandbits(32))  # seeds side by side would give overlapping items
        except Exception:  # of any kind: several families raise where their search finds nothing
            return None
        return item if item_problem(family, levels, item) is None else None

    def _task(self, family: str, levels: Levels, rng: Random, parent: Task | None = None) -> Task | None:
        item = self._item(family, levels, rng)
        if item is None:
            return None
        spec = {"family": family, "levels": dict(levels), "question": item.question, "answer": item.answer}
        name, most = _id(family, item.question), sum(self._tops(family).values())
        difficulty = min(1.0, sum(level for _, level in levels) / most) if most else 0.0
        root, before, version = (name, None, 0) if parent is None else (parent.root_id, parent.id, parent.version + 1)
        return Task(name, self.name, {**spec, "metadata": item.metadata}, difficulty, root, before, version, kind=family)

    def _frame(self, family: str) -> tuple[str, str]:
        questions = []
        for index in range(FRAME_QUESTIONS):
            rng = Random(f"frame/{family}/{index}")
            item = self._item(family, self._draw_levels(family, rng, rng.random(), "in_domain"), rng)
            questions += [item.question] if item is not None else []
        return shared_frame(questions) if len(questions) > 1 else ("", "")


def _question(episode: Episode) -> Question:
    if not isinstance(episode, Question):
        raise TypeError(f"Not a question of reasoning-gym: {type(episode).__name__}")
    return episode


def _levels_of(task: Task) -> Levels:
    return tuple((str(attribute), int(level)) for attribute, level in task.spec["levels"].items())


def _item_of(task: Task) -> Item:
    spec: Mapping[str, Any] = task.spec
    return Item(spec["question"], spec["answer"], spec["metadata"])


def _id(family: str, question: str) -> str:
    return f"{family}-{hashlib.sha256(f'{family}/{question}'.encode()).hexdigest()[:16]}"


def _with_level(levels: Levels, attribute: str, level: int) -> Levels:
    return tuple((name, level if name == attribute else old) for name, old in levels)


def _moved(levels: Levels, tops: Mapping[str, int], steps: int, rng: Random) -> Levels:
    """The levels after so many steps up (or down, where negative) of random attributes, fewer where there is no room."""
    step = 1 if steps > 0 else -1
    for _ in range(abs(steps)):
        free = [(name, level) for name, level in levels if 0 <= level + step <= tops[name]]
        if not free:
            break
        name, level = rng.choice(free)
        levels = _with_level(levels, name, level + step)
    return levels


def _slip(answer: str, rng: Random) -> str:
    """One character dropped, doubled, or exchanged for another one of its sort."""
    place = rng.randrange(len(answer))
    old = answer[place]
    if old.isdigit():
        new = rng.choice("0123456789")
    elif old.isalpha():
        new = rng.choice("abcdefghijklmnopqrstuvwxyz")
        new = new.upper() if old.isupper() else new
    else:
        new = old
    return answer[:place] + rng.choice(("", old + old, new)) + answer[place + 1 :]
