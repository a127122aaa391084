"""The household as an `Environment`: sampling, rewriting, validation, expert and step labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from random import Random
from typing import Any

from rla_lightning.environments.alfred.episode import AlfredEpisode
from rla_lightning.environments.alfred.knowledge import FILLER_WORDS, MIDDLE, SLOT_WORDS, STATE_WORDS, word_of
from rla_lightning.environments.alfred.planner import CRITIQUES, THOUGHTS, expert_step, label
from rla_lightning.environments.alfred.scene import GOAL_KINDS, KIND_WORDS, VERBS
from rla_lightning.environments.alfred.world import is_won
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.environments.household.affordances import (
    FITS,
    LAMP_HOLDERS,
    LAMP_TYPE,
    OBJECT_NAMES,
    OBJECT_TYPES,
    OPENABLE,
    RECEPTACLE_LIMITS,
    RECEPTACLE_NAMES,
    TYPE,
    instruction_of,
    is_held_out,
    legal_pairs,
)
from rla_lightning.environments.household.edits import NEUTRAL, Change, edited
from rla_lightning.environments.household.scenes import (
    MAX_TURNS_OOD,
    MIN_RECEPTACLES,
    OOD_EXTRA,
    Limits,
    difficulty_of,
    draw_spec,
    goal_of,
    initial_world,
    knobs_of,
    plan_length,
    redrawn_spec,
    spec_id,
)
from rla_lightning.types import ConfigError, Direction, ExpertAction, Split, StepLabel, Task

KNOB_WORDS = ("receptacles", "distractors", "closed", "hidden", "copies", "noise", "turns")
PLAN_SLACK = 1.25  # turns that a task must allow for each step of its shortest plan
_MAX_RECEPTACLES = 12  # of the in-domain setting
_ATTEMPTS = 6  # edits tried per wanted candidate, plus 20: some edits do not apply to a small scene


class HouseholdEnvironment(Environment):
    """An AlfWorld-like text household.

    Args:
        goal_kinds: ALFRED's names of the goal kinds that are drawn.
        max_receptacles: most receptacles of an in-domain scene, 5 to 12; out-of-distribution scenes have 1 to 3 more.
        max_noise: largest probability that an observation leaves an object out, 0 to 0.5.
        turn_slack: turn limit over the expected number of turns of an expert who has to search.
        turns: turn limit of every task, so that larger rooms leave less time to search; null: turn_slack decides.
        max_edits: most edits between a task and its rewrite.
        changes: what else a rewrite may change, besides what makes it harder or easier: layout (where things are), goal (another
            object or target; its kind never changes).
    """

    name = "household"

    def __init__(
        self,
        goal_kinds: Sequence[str] = GOAL_KINDS,
        max_receptacles: int = 9,
        max_noise: float = 0.3,
        turn_slack: float = 1.8,
        turns: int | None = None,
        max_edits: int = 60,
        changes: Sequence[Change] = ("layout", "goal"),
    ) -> None:
        self.goal_kinds = tuple(goal_kinds)
        if not self.goal_kinds:
            raise ConfigError("household: goal_kinds is empty")
        for kind in self.goal_kinds:
            if kind not in GOAL_KINDS:
                raise ConfigError(f"household: unknown goal kind {kind!r}; known are {', '.join(GOAL_KINDS)}")
        if not MIN_RECEPTACLES < max_receptacles <= _MAX_RECEPTACLES:
            raise ConfigError(f"household: max_receptacles must be from 5 to {_MAX_RECEPTACLES}, got {max_receptacles}")
        if not 0 <= max_noise <= 0.5:
            raise ConfigError(f"household: max_noise must be from 0 to 0.5, got {max_noise}")
        if not turn_slack >= 1:
            raise ConfigError(f"household: turn_slack must be at least 1, got {turn_slack}")
        if turns is not None and not 1 <= turns <= MAX_TURNS_OOD:
            raise ConfigError(f"household: turns must be from 1 to {MAX_TURNS_OOD} or null, got {turns}")
        if max_edits < 1:
            raise ConfigError(f"household: max_edits must be at least 1, got {max_edits}")
        for change in changes:
            if change not in NEUTRAL:
                raise ConfigError(f"household: unknown change {change!r}; known are {', '.join(NEUTRAL)}")
        self.max_edits, self.changes = max_edits, tuple(changes)
        self.limits = Limits(max_receptacles, max_noise, turn_slack, turns)

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        if not 0 <= difficulty <= 1:
            raise ConfigError(f"household: difficulty must be from 0 to 1, got {difficulty}")
        spec = draw_spec(rng, difficulty, split, self.goal_kinds, self.limits)
        name = spec_id(spec)
        return Task(name, self.name, spec, difficulty_of(spec), root_id=name, kind=spec["goal"]["kind"])

    def start(self, task: Task) -> AlfredEpisode:
        spec = task.spec
        instruction = spec["instruction"].removesuffix(".")
        return AlfredEpisode(goal_of(spec), initial_world(spec), instruction, spec["max_turns"], spec["noise"], spec["seed"])

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> Sequence[Task]:
        """Valid rewrites of an in-domain task, each 1 to `max_edits` edits away; a held-out task has none."""
        found: dict[str, Task] = {}
        if task.spec["split"] != "in_domain":
            return ()
        for _ in range(_ATTEMPTS * number + 20):
            if len(found) == number:
                break
            spec = edited(task.spec, direction, rng, self.limits, self.max_edits, self.changes)
            if spec is None:
                continue
            name = spec_id(spec)
            child = Task(name, self.name, spec, difficulty_of(spec), task.root_id, task.id, task.version + 1, task.kind)
            if name not in found and self.validate(child, task) is None:
                found[name] = child
        return tuple(found.values())

    def redraw(self, task: Task, rng: Random) -> Task | None:
        spec = redrawn_spec(task.spec, rng)
        if spec is None:
            return None
        name = spec_id(spec)
        return Task(name, self.name, spec, difficulty_of(spec), root_id=name, kind=task.kind)

    def knobs(self, task: Task) -> Mapping[str, float]:
        plan = plan_length(task.spec)
        return {name: float(value) for name, value in asdict(knobs_of(task.spec)).items()} | {"plan": float(plan or 0)}

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        problem = next(_scene_problems(task.spec), None) or next(_goal_problems(task.spec), None)
        if problem is None and parent is not None and {**task.spec, "seed": 0} == {**parent.spec, "seed": 0}:
            return "The task equals its parent."
        return problem

    def describe(self, task: Task) -> str:
        goal, knobs = goal_of(task.spec), knobs_of(task.spec)
        tenths = round(10 * knobs.noise)
        values = (knobs.receptacles, knobs.distractors, knobs.closed, knobs.hidden, knobs.copies, tenths, knobs.max_turns)
        settings = " ".join(f"{word} n{value}" for word, value in zip(KNOB_WORDS, values, strict=True))
        return f"{goal.word} {goal.object} {goal.target} {settings}"

    def vocabulary(self) -> tuple[str, ...]:
        words = {*KIND_WORDS.values(), *OBJECT_TYPES, *RECEPTACLE_LIMITS, LAMP_TYPE, MIDDLE}
        words |= {word_of(name) for name in RECEPTACLE_NAMES + OBJECT_NAMES}
        words |= {*SLOT_WORDS, *FILLER_WORDS, *STATE_WORDS.values(), *VERBS, *KNOB_WORDS, *THOUGHTS, *CRITIQUES}
        words |= {f"n{value}" for value in range(MAX_TURNS_OOD + 1)}
        return tuple(sorted(words))

    def expert(self, episode: Episode, rng: Random) -> ExpertAction | None:
        household = _household(episode)
        return expert_step(household.knowledge, household.actions, rng)

    def label_step(self, episode: Episode, action: str) -> StepLabel | None:
        household = _household(episode)
        return label(household.knowledge, household.world, household.distance(), household.parse(action))


def _household(episode: Episode) -> AlfredEpisode:
    if not isinstance(episode, AlfredEpisode):
        raise TypeError(f"Not an episode of the household: {type(episode).__name__}")
    return episode


def _scene_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    """What contradicts the tables of the household."""
    names = [r["name"] for r in spec["receptacles"]]
    objects = [o["name"] for o in spec["objects"]]
    if spec["goal"]["kind"] not in GOAL_KINDS:
        yield f"Unknown goal kind {spec['goal']['kind']!r}."
    for name in [n for n in names if n not in RECEPTACLE_NAMES] + [n for n in objects if n not in OBJECT_NAMES]:
        yield f"There is no {name!r} in the household."
    if len(set(names)) < len(names) or len(set(objects)) < len(objects):
        yield "A name occurs twice."
    if not MIN_RECEPTACLES <= len(names) <= _MAX_RECEPTACLES + OOD_EXTRA:
        yield f"A scene has {MIN_RECEPTACLES} to {_MAX_RECEPTACLES + OOD_EXTRA} receptacles, not {len(names)}."
    for r in spec["receptacles"]:
        if not r["open"] and r["name"] not in OPENABLE:
            yield f"The {r['name']} cannot be closed."
    for o in spec["objects"]:
        kind, place = TYPE[o["name"]], o["place"]
        if place not in names or not (TYPE[place] in LAMP_HOLDERS if kind == LAMP_TYPE else kind in FITS[TYPE[place]]):
            yield f"The {o['name']} cannot be at {place!r}."


def _goal_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the goal of a scene that the tables allow."""
    goal, world = goal_of(spec), initial_world(spec)
    if spec["instruction"] != instruction_of(goal) + ".":
        yield f"The instruction {spec['instruction']!r} disagrees with the goal."
    if (goal.object, goal.target) not in legal_pairs(goal.kind):
        yield f"The pair {goal.object}, {goal.target} makes no goal of kind {goal.kind}."
    if spec["split"] == "in_domain" and is_held_out(goal.object, goal.target):
        yield f"The pair {goal.object}, {goal.target} is held out."
    if is_won(goal, world):
        yield "The goal already holds."
    steps = plan_length(spec)
    if steps is None:
        yield "The goal cannot be reached."
    elif ceil(PLAN_SLACK * steps) > spec["max_turns"]:
        yield f"The turn limit {spec['max_turns']} is too short for a plan of {steps} steps."
