"""AlfWorld as an `Environment`: its own games or locally built ones, in our simulator or in TextWorld itself."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, Literal

from rla_lightning.environments.alfred.affordances import goal_problem, instructions
from rla_lightning.environments.alfred.episode import AlfredEpisode
from rla_lightning.environments.alfred.planner import distance, expert_step, label
from rla_lightning.environments.alfred.scene import GOAL_KINDS, Goal
from rla_lightning.environments.alfred.vocabulary import KNOB_WORDS, MAX_COUNT, alfred_vocabulary
from rla_lightning.environments.alfworld.builder import Size, build_games
from rla_lightning.environments.alfworld.edits import CHANGES, DIRECTED, Change, Edits, apply_edits, expected_turns
from rla_lightning.environments.alfworld.engine import TextWorldEngine, TextWorldEpisode
from rla_lightning.environments.alfworld.games import Game, GameEntry, game_of, index_games, read_engine_texts, read_game
from rla_lightning.environments.alfworld.pddl import GameError, render_problem
from rla_lightning.environments.alfworld.rewriting import goal_of_answer, rewrite_prompt
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.types import ConfigError, Direction, ExpertAction, Purpose, Split, StepLabel, Task, Transition

logger = logging.getLogger(__name__)

FOLDERS: Mapping[tuple[Purpose, Split], str] = {  # where the games of a purpose lie
    ("train", "in_domain"): "train",
    ("validation", "in_domain"): "train",
    ("validation", "out_of_distribution"): "train",
    ("test", "in_domain"): "valid_seen",
    ("test", "out_of_distribution"): "valid_unseen",
}
TUNING_SHARE = 16  # one in so many rooms, and one in so many games of the others, tunes instead of training
PLAN_SLACK = 1.25  # turns that a rewritten game must allow for each step of its shortest plan
HARD_TURNS = 40  # expected turns at which the difficulty scale ends
MAX_EDITS = 3  # of one rewrite
_ATTEMPTS = 6  # rewrites tried per wanted candidate
_CACHED = 256  # games kept in memory


@dataclass(frozen=True)
class LocalGames:
    """Games to build where the data folder does not exist yet; see `rla games`.

    Args:
        number: of training games.
        evaluation_games: of each of the two test sets; null: an eighth of `number`.
        seed: of everything about them.
        size: full has about as many receptacles as ALFRED's rooms, 8 to 40; small has 4 to 10, for tiny models.
    """

    number: int = 256
    evaluation_games: int | None = None
    seed: int = 0
    size: Size = "full"

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ConfigError(f"alfworld: build.number must be at least 1, got {self.number}")


class AlfWorldEnvironment(Environment):
    """AlfWorld's games (Shridhar et al. 2021, arXiv 2010.03768).

    The reported test sets are AlfWorld's valid_seen (in domain) and valid_unseen (out of distribution). A share of the
    training games is kept for tuning: games of rooms that are trained on (in domain) and all of a few other rooms.

    Args:
        data: folder with train, valid_seen and valid_unseen (or with json_2.1.1 around them), AlfWorld's or of `rla games`.
        build: games to build there when the folder does not exist; null: it has to exist.
        backend: fast is our simulator; textworld the engine itself: texts and commands only, no digests, expert or labels.
        kinds: ALFRED's names of the task kinds that are used.
        max_turns: limit of turns in training.
        eval_max_turns: limit of turns in validation and test.
        changes: what adapters may change: goal (its object and target), distractors, hiding (where the object lies).
        workers: processes of the textworld backend.
    """

    name = "alfworld"

    def __init__(
        self,
        data: str,
        build: LocalGames | None = None,
        backend: Literal["fast", "textworld"] = "fast",
        kinds: Sequence[str] = GOAL_KINDS,
        max_turns: int = 40,
        eval_max_turns: int = 60,
        changes: Sequence[Change] = CHANGES,
        workers: int = 2,
    ) -> None:
        if not kinds:
            raise ConfigError("alfworld: kinds is empty")
        for kind in kinds:
            if kind not in GOAL_KINDS:
                raise ConfigError(f"alfworld: unknown kind {kind!r}; known are {', '.join(GOAL_KINDS)}")
        for name, value in (("max_turns", max_turns), ("eval_max_turns", eval_max_turns), ("workers", workers)):
            if value < 1:
                raise ConfigError(f"alfworld: {name} must be at least 1, got {value}")
        if backend not in ("fast", "textworld"):
            raise ConfigError(f"alfworld: backend must be fast or textworld, got {backend!r}")
        for change in changes:
            if change not in CHANGES:
                raise ConfigError(f"alfworld: unknown change {change!r}; known are {', '.join(CHANGES)}")
        root = Path(data).expanduser()
        if build is not None and not root.exists():
            logger.warning("alfworld: building %d games of seed %d in %s", build.number, build.seed, root)
            build_games(root, build.number, build.seed, build.size, build.evaluation_games)
        self.folder = index_games(root, kinds)
        if self.folder.skipped:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in self.folder.skipped.items())
            logger.warning("alfworld: skipped in %s: %s", self.folder.root, reasons)
        self.root = self.folder.root
        self.changes = tuple(changes)
        self.max_turns, self.eval_max_turns = max_turns, eval_max_turns
        self.engine = TextWorldEngine(workers) if backend == "textworld" else None
        self._corpora: dict[tuple[Purpose, Split], tuple[Task, ...]] = {}

    # Which tasks there are

    def corpus(self, purpose: Purpose, split: Split) -> Sequence[Task]:
        if (purpose, split) not in FOLDERS:
            return ()
        if (purpose, split) not in self._corpora:
            self._corpora[purpose, split] = self._read_corpus(purpose, split)
        return self._corpora[purpose, split]

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        """One of the training games, or of the tuning games from other rooms; the nearest of 8 draws to the difficulty."""
        if not 0 <= difficulty <= 1:
            raise ConfigError(f"alfworld: difficulty must be from 0 to 1, got {difficulty}")
        tasks = self.corpus("train" if split == "in_domain" else "validation", split)
        drawn = [rng.choice(tasks) for _ in range(8)]
        return min(drawn, key=lambda task: abs(task.difficulty - difficulty))

    def _read_corpus(self, purpose: Purpose, split: Split) -> tuple[Task, ...]:
        entries = self.folder.games[FOLDERS[purpose, split]]
        if FOLDERS[purpose, split] == "train":
            entries = tuple(entry for entry in entries if self._purpose(entry) == (purpose, split))
        limit = self.max_turns if purpose == "train" else self.eval_max_turns
        tasks: list[Task] = []
        skipped: Counter[str] = Counter()
        for entry in entries:
            spec = {"game": entry.path, "purpose": purpose, "max_turns": limit}
            try:
                turns = expected_turns(self._game(spec))
            except GameError as error:
                skipped[str(error)] += 1
                continue
            if turns is None:
                skipped["no plan reaches the goal"] += 1
                continue
            tasks.append(_task(spec, _difficulty(turns), entry.kind))
        if skipped:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
            logger.warning("alfworld: skipped %d of %d games for %s: %s", skipped.total(), len(entries), purpose, reasons)
        if not tasks:
            raise ConfigError(f"alfworld: {self.root / FOLDERS[purpose, split]} has no playable games for {purpose} {split}")
        return tuple(tasks)

    def _purpose(self, entry: GameEntry) -> tuple[Purpose, Split]:
        """What a game of the folder `train` is used for; a function of its path and of which rooms there are."""
        if entry.scene in self._tuning_scenes:
            return "validation", "out_of_distribution"
        return ("validation", "in_domain") if _hash(entry.path) % TUNING_SHARE == 0 else ("train", "in_domain")

    @cached_property
    def _tuning_scenes(self) -> frozenset[str]:
        scenes = {entry.scene for entry in self.folder.games["train"]}
        return frozenset(sorted(scenes, key=_hash)[: max(1, len(scenes) // TUNING_SHARE)] if len(scenes) > 1 else ())

    # Playing

    def start(self, task: Task) -> Episode:
        limit = int(task.spec["max_turns"])
        if self.engine is not None:
            return self.engine.start(self._engine_texts(task.spec), limit)
        game = self._game(task.spec)
        return AlfredEpisode(game.problem.goal, game.start.copy(), game.instruction, limit)

    def step_all(self, episodes: Sequence[Episode], actions: Sequence[str]) -> list[Transition | Exception]:
        if self.engine is None:
            return super().step_all(episodes, actions)
        return self.engine.play_all([_textworld(episode) for episode in episodes], actions)

    def expert(self, episode: Episode, rng: Random) -> ExpertAction | None:
        return expert_step(episode.knowledge, episode.actions, rng) if isinstance(episode, AlfredEpisode) else None

    def label_step(self, episode: Episode, action: str) -> StepLabel | None:
        if not isinstance(episode, AlfredEpisode):
            return None
        return label(episode.knowledge, episode.world, episode.distance(), episode.parse(action))

    def describe(self, task: Task) -> str:
        game = self._game(task.spec)
        goal, scene, start = game.problem.goal, game.scene, game.start
        lying = start.places
        own = scene.of_type(goal.object)
        values = (
            len(scene.receptacles),
            sum(thing.type != goal.object and "pickup" in thing.can for thing in scene.objects.values()),
            sum(start.is_shut(name) for name in scene.receptacles),
            sum(name in lying and start.is_shut(lying[name]) for name in own),
            len(own),
        )
        knobs = " ".join(f"{word} n{min(value, MAX_COUNT)}" for word, value in zip(KNOB_WORDS, values, strict=True))
        return f"{goal.word}{' sliced' if goal.sliced else ''} {goal.object} {goal.target} {knobs}"

    def vocabulary(self) -> tuple[str, ...]:
        return alfred_vocabulary()

    # Rewriting

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> Sequence[Task]:
        """Rewrites of a training game, 1 to 3 edits away, that an expert would need more (fewer) turns for."""
        if task.spec["purpose"] != "train":
            return ()
        found: dict[str, Task] = {}
        before = expected_turns(self._game(task.spec))
        for _ in range(_ATTEMPTS * number):
            if len(found) == number:
                break
            child = self._child(task, self._edited(task, direction, rng))
            after = None if child is None else expected_turns(self._game(child.spec))
            if (
                child is None
                or before is None
                or after is None
                or (after > before) is not (direction == "harder")
                or after == before
            ):
                continue
            if child.id not in found and self.validate(child, task) is None:
                found[child.id] = child
        return tuple(found.values())

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        """Games from the files were checked when the corpus was read; rewrites have to pass every filter."""
        if "edits" not in task.spec:
            return "The task equals its parent." if parent is not None and parent.spec == task.spec else None
        try:
            game = self._game(task.spec)
        except GameError as error:
            return str(error)
        return next(_problems(task, parent, game), None)

    def rewrite_prompt(self, task: Task, direction: Direction, critique: str, successes: int, rollouts: int) -> str | None:
        if task.spec["purpose"] != "train" or "goal" not in self.changes:
            return None
        return rewrite_prompt(self._game(task.spec), direction, critique, successes, rollouts)

    def apply_rewrite(self, task: Task, answer: str) -> Task | str:
        game = self._game(task.spec)
        goal = goal_of_answer(game.problem.goal, game.scene, answer)
        if isinstance(goal, str):
            return goal
        if goal == game.problem.goal:
            return "The goal is unchanged."
        child = self._child(task, replace(Edits.from_spec(task.spec.get("edits", {})), goal=goal))
        return "The goal is that of the original game." if child is None else self.validate(child, task) or child

    def _edited(self, task: Task, direction: Direction, rng: Random) -> Edits:
        edits = Edits.from_spec(task.spec.get("edits", {}))
        base = self._game({"game": task.spec["game"]})
        choices = [edit for change in self.changes for edit in DIRECTED[direction, change]]
        for _ in range(rng.randint(1, MAX_EDITS) if choices else 0):
            game = game_of(apply_edits(base.problem, edits), base.instruction)
            edits = rng.choice(choices)(game, edits, rng) or edits
        return edits

    def _child(self, task: Task, edits: Edits) -> Task | None:
        """The task with other edits of its game; None when nothing is left that differs from the game's file."""
        edits = edits.reduced(self._game({"game": task.spec["game"]}).problem)
        changed = edits.to_spec()
        if not changed:
            return None
        spec: dict[str, Any] = {**task.spec, "edits": changed}
        spec.pop("instruction", None)
        if edits.goal is not None:
            spec["instruction"] = instructions(edits.goal)[0]  # one sentence per goal, so that equal goals are equal tasks
        try:
            turns = expected_turns(self._game(spec))
        except GameError:
            return None
        return _task(spec, _difficulty(turns or HARD_TURNS), task.kind, task)

    # Games

    def _game(self, spec: Mapping[str, Any]) -> Game:
        edits = json.dumps(spec["edits"], sort_keys=True) if "edits" in spec else ""
        return _load(self.root, spec["game"], edits, spec.get("instruction", ""), self.engine is None)

    def _engine_texts(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """What the engine loads: the file as it is, or with another problem and instruction."""
        texts = read_engine_texts(self.root / spec["game"], spec.get("instruction"))
        return {**texts, "pddl_problem": render_problem(self._game(spec).problem)} if "edits" in spec else texts


@lru_cache(maxsize=_CACHED)
def _load(root: Path, name: str, edits: str, instruction: str, known_dialect_only: bool) -> Game:
    if not edits:
        return read_game(root / name, known_dialect_only)
    base = _load(root, name, "", "", known_dialect_only)
    problem = apply_edits(base.problem, Edits.from_spec(json.loads(edits)))
    return game_of(problem, instruction or base.instruction)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _difficulty(turns: float) -> float:
    return round(min(1.0, turns / HARD_TURNS), 4)


def _task(spec: Mapping[str, Any], difficulty: float, kind: str, parent: Task | None = None) -> Task:
    name = "alfworld-" + hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:12]
    if parent is None:
        return Task(name, AlfWorldEnvironment.name, spec, difficulty, root_id=name, kind=kind)
    return Task(name, AlfWorldEnvironment.name, spec, difficulty, parent.root_id, parent.id, parent.version + 1, kind=kind)


def _problems(task: Task, parent: Task | None, game: Game) -> Iterator[str]:
    """What is wrong with a rewritten game."""
    goal: Goal = game.problem.goal
    if task.spec["purpose"] != "train":
        yield "A held-out game cannot be rewritten."
    if parent is not None and parent.spec == task.spec:
        yield "The task equals its parent."
    if "instruction" in task.spec and game.instruction not in instructions(goal):
        yield f"The instruction {game.instruction!r} disagrees with the goal."
    problem = goal_problem(goal, game.scene, game.start)
    if problem is not None:
        yield problem
    steps = distance(goal, game.start)
    if steps is None:
        yield "No plan reaches the goal."
    elif ceil(PLAN_SLACK * steps) > task.spec["max_turns"]:
        yield f"The turn limit {task.spec['max_turns']} is too short for a plan of {steps} steps."


def _textworld(episode: Episode) -> TextWorldEpisode:
    if not isinstance(episode, TextWorldEpisode):
        raise TypeError(f"Not an episode of the textworld backend: {type(episode).__name__}")
    return episode
