"""Builds games like AlfWorld's without its data: rooms, objects, goals of all kinds, each proved solvable.

Game i of a split is a function of (seed, split, i). The files have AlfWorld's layout and naming; with the alfworld
package installed they also carry its planning domain and grammar, so that AlfWorld's own loader plays them.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from rla_lightning.environments.alfred.affordances import (
    ABILITIES,
    FITS,
    LAMP_TYPES,
    MOVABLE_RECEPTACLES,
    OPENABLE_TYPES,
    ROOMS,
    SPELLING,
    abilities_of,
    goal_problem,
    instructions,
)
from rla_lightning.environments.alfred.planner import plan
from rla_lightning.environments.alfred.scene import APPLIANCES, GOAL_KINDS, Ability, Goal
from rla_lightning.environments.alfred.world import admissible, is_won
from rla_lightning.environments.alfworld.games import (
    GAME_FILE,
    SUBFOLDERS,
    TRAJECTORY_FILE,
    Game,
    engine_texts,
    game_of,
    with_instruction,
    write_json,
)
from rla_lightning.environments.alfworld.pddl import CONSTANTS, Fact, Problem, render_problem
from rla_lightning.environments.alfworld.rooms import (
    DISTRACTORS,
    FIRST_SCENE,
    LAMP_PLACES,
    SEEN_SCENES,
    THINGS,
    UNSEEN_SCENES,
    Room,
    Size,
    entity_of,
    room_of,
)
from rla_lightning.types import ConfigError

SLICED_SHARE = 0.1  # of the kinds that can be sliced
LEAST_EVALUATION_GAMES = len(GOAL_KINDS)  # of valid_seen and valid_unseen each
PREDICATES: Mapping[Ability, str] = {
    "pickup": "pickupable",
    "heat": "heatable",
    "cool": "coolable",
    "clean": "cleanable",
    "slice": "sliceable",
    "toggle": "toggleable",
}
DATA_FOLDER = "json_2.1.1"  # ALFRED's name for its data
_TRIES = 200  # draws of one game


@dataclass(frozen=True)
class BuiltGames:
    """What `build_games` made."""

    root: Path
    games: Mapping[str, Mapping[str, int]]  # subfolder -> kind -> number
    sliced: int
    mean_steps: float  # of the walkthroughs
    has_engine_texts: bool

    def __str__(self) -> str:
        lines = [f"{name}: {sum(kinds.values())} games ({_listed(kinds)})" for name, kinds in self.games.items()]
        lines.append(f"{self.sliced} with something to slice; walkthroughs of {self.mean_steps:.1f} steps on average")
        if not self.has_engine_texts:
            lines.append("without TextWorld's texts: AlfWorld is not installed, so only the fast backend plays them")
        return "\n".join(lines)


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))


def build_games(
    root: Path,
    number: int = 256,
    seed: int = 0,
    size: Size = "full",
    evaluation_games: int | None = None,
    sliced_share: float = SLICED_SHARE,
) -> BuiltGames:
    """Build AlfWorld games in a folder, below json_2.1.1; all of them or, after an error, none.

    Args:
        root: a folder that does not exist or is empty.
        number: of training games.
        seed: of every random draw.
        size: full has about as many receptacles as ALFRED's rooms, 8 to 40; small has 4 to 10, for tiny models.
        evaluation_games: in valid_seen and in valid_unseen; null: an eighth of `number`, at least 6.
        sliced_share: of the games whose kind and room allow it, how many ask for something sliced.
    """
    for name, value in (("number", number), ("evaluation_games", evaluation_games)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 <= sliced_share <= 1:
        raise ConfigError(f"sliced_share must be from 0 to 1, got {sliced_share}")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{str(root)!r} exists and is not an empty folder: games are never overwritten")
    held_out = max(LEAST_EVALUATION_GAMES, number // 8) if evaluation_games is None else evaluation_games
    sizes = dict(zip(SUBFOLDERS, (number, held_out, held_out), strict=True))
    texts = engine_texts()
    place = root if root.is_dir() else root.parent  # an existing folder stays: it may be a mount or where the user is
    place.mkdir(parents=True, exist_ok=True)
    counts: dict[str, Counter[str]] = {name: Counter() for name in sizes}
    steps, sliced = 0, 0
    with tempfile.TemporaryDirectory(dir=place, prefix=".rla-games-") as folder:
        built = Path(folder) / "built"
        for subfolder, wanted in sizes.items():
            for game, room, trial in _distinct_games(subfolder, wanted, seed, size, sliced_share):
                _write(built / DATA_FOLDER / subfolder, game, room, trial, texts)
                counts[subfolder][game.problem.goal.kind] += 1
                steps += len(game.walkthrough)
                sliced += game.problem.goal.sliced
        _move(built, root, place)
    return BuiltGames(root, counts, sliced, steps / sum(sizes.values()), texts is not None)


def _move(built: Path, root: Path, place: Path) -> None:
    """Into place in one step; another process that was faster has built the same games."""
    source, target = (built / DATA_FOLDER, root / DATA_FOLDER) if place == root else (built, root)
    try:
        source.rename(target)
    except OSError:
        if not (root / DATA_FOLDER).is_dir():
            raise


def _distinct_games(subfolder: str, number: int, seed: int, size: Size, sliced_share: float) -> Iterator[tuple[Game, Room, int]]:
    """(game, its room, number of the trial): no two games of a split with the same problem."""
    seen: set[Problem | tuple[frozenset[Fact], Goal]] = set()
    for index in range(number):
        kind = GOAL_KINDS[index % len(GOAL_KINDS)]
        for attempt in range(_TRIES):
            rng = Random(f"{seed}/{size}/{subfolder}/{index}/{attempt}")
            place = rng.choice(sorted(ROOMS[kind]))
            scene = FIRST_SCENE[place] + rng.choice(UNSEEN_SCENES if subfolder == "valid_unseen" else SEEN_SCENES)
            room = room_of(place, scene, seed, size)
            game = _draw(room, kind, rng, size, sliced_share)
            if game is not None and (game.problem.facts, game.problem.goal) not in seen:
                seen.add((game.problem.facts, game.problem.goal))
                yield game, room, index
                break
        else:
            raise ConfigError(f"no more distinct games of kind {kind} found for {subfolder}")


def _draw(room: Room, kind: str, rng: Random, size: Size, sliced_share: float) -> Game | None:
    """A solvable game in a room; None when the draw does not work out."""
    goal = _draw_goal(room, kind, rng, sliced_share)
    if goal is None:
        return None
    problem = Problem(*_furnish(room, goal, rng, size), goal)
    game = game_of(problem, rng.choice(instructions(goal)))
    if goal_problem(goal, game.scene, game.start) is not None:
        return None
    walkthrough = _walkthrough(game)
    return None if walkthrough is None else replace(game, walkthrough=walkthrough)


def _draw_goal(room: Room, kind: str, rng: Random, sliced_share: float) -> Goal | None:
    present = {name for _, name, _ in room.receptacles}
    asked = Goal(kind, "", "")
    if asked.word == "light":
        if not present & LAMP_PLACES:
            return None
        return Goal(kind, rng.choice(_placeable(room)), rng.choice(LAMP_TYPES))
    things = [name for name in _placeable(room) if asked.process is None or name in ABILITIES[asked.process]]
    sliceable = [name for name in things if name in ABILITIES["slice"]]
    sliced = bool(sliceable) and room.kind == "kitchen" and rng.random() < sliced_share
    pairs = [
        (name, target)
        for name in (sliceable if sliced else things)
        for target in sorted(present)
        if name in FITS[target] and APPLIANCES.get(target) != asked.word
    ]
    return Goal(kind, *rng.choice(pairs), sliced) if pairs else None


def _placeable(room: Room) -> list[str]:
    present = {name for _, name, _ in room.receptacles}
    return [name for name in THINGS[room.kind] if any(name in FITS[target] for target in present)]


def _furnish(room: Room, goal: Goal, rng: Random, size: Size) -> tuple[dict[str, str], frozenset[Fact]]:
    """The objects and facts of a game: the goal's objects, a lamp or a knife where needed, and distractors."""
    own = goal.count + rng.choice((0, 0, 1, 1, 2))
    kinds = [goal.object] * own
    kinds += [goal.target] if goal.word == "light" else []
    kinds += [rng.choice(("knife", "butterknife"))] if goal.sliced else []
    kinds += [rng.choice(_placeable(room)) for _ in range(rng.randint(*DISTRACTORS[size]))]
    numbers: Counter[str] = Counter()
    placed: list[tuple[str, str, str, str]] = []  # entity, type, receptacle, location
    for position, kind in enumerate(kinds):
        if position >= own and kind == goal.object:
            continue
        places = [r for r in room.receptacles if (r[1] in LAMP_PLACES if kind in LAMP_TYPES else kind in FITS[r[1]])]
        places = [r for r in places if not (kind == goal.object and r[1] == goal.target)]
        if places and numbers[kind] < 6:
            numbers[kind] += 1
            place = rng.choice(places)
            placed.append((entity_of(kind, numbers[kind]), kind, place[0], place[2]))
    return _objects(room, placed, goal), frozenset(_facts(room, placed, rng))


def _objects(room: Room, placed: list[tuple[str, str, str, str]], goal: Goal) -> dict[str, str]:
    objects = {"agent1": "agent", "loc_bar_0": "location"}
    objects |= {location: "location" for _, _, location in room.receptacles}
    objects |= {entity: "receptacle" for entity, _, _ in room.receptacles}
    objects |= {entity: "object" for entity, *_ in placed}
    objects |= {f"{kind}type": "rtype" for _, kind, _ in room.receptacles}
    objects |= {f"{kind}type": "otype" for _, kind, *_ in placed}
    return {**CONSTANTS, **objects, f"{goal.object}type": "otype"}


def _facts(room: Room, placed: list[tuple[str, str, str, str]], rng: Random) -> Iterator[Fact]:
    yield ("atlocation", "agent1", "loc_bar_0")
    kinds = {kind for _, kind, *_ in placed}
    for entity, kind, location in room.receptacles:
        yield ("receptacletype", entity, f"{kind}type")
        yield ("receptacleatlocation", entity, location)
        if kind in OPENABLE_TYPES:
            yield ("openable", entity)
        for fitting in FITS[kind] & kinds:
            yield ("cancontain", f"{kind}type", f"{fitting}type")
    holders = [(entity, place) for entity, kind, place, _ in placed if kind in MOVABLE_RECEPTACLES]
    for entity, kind, place, location in placed:
        yield ("objecttype", entity, f"{kind}type")
        yield ("inreceptacle", entity, place)
        yield ("objectatlocation", entity, location)
        for ability in abilities_of(kind):
            yield (PREDICATES[ability], entity)
        if kind in MOVABLE_RECEPTACLES:
            yield ("isreceptacleobject", entity)
        beside = [holder for holder, where in holders if where == place and holder != entity]
        if beside and kind not in MOVABLE_RECEPTACLES and rng.random() < 0.3:  # a spoon in a cup
            yield ("inreceptacleobject", entity, rng.choice(beside))


def _walkthrough(game: Game) -> tuple[str, ...] | None:
    """The commands of a shortest plan, which win in the simulator; None when there is no plan."""
    goal, world = game.problem.goal, game.start.copy()
    actions = plan(goal, world)
    if not actions:
        return None
    commands = []
    for action in actions:
        commands.append(next(text for text, known in admissible(world).items() if known == action))
        world.apply(action)
    if not is_won(goal, world):
        raise RuntimeError(f"the plan {commands} does not reach {goal}")
    return tuple(commands)


def _write(parent: Path, game: Game, room: Room, trial: int, texts: tuple[str, str] | None) -> None:
    goal = game.problem.goal
    thing = SPELLING[goal.object] + ("Sliced" if goal.sliced else "")
    folder = parent / f"{goal.kind}-{thing}-None-{SPELLING[goal.target]}-{room.scene}" / f"trial_T{trial:08d}"
    domain, grammar = texts or ("", "")
    data: dict[str, Any] = {
        "pddl_domain": domain,
        "grammar": with_instruction(grammar, game.instruction),
        "pddl_problem": render_problem(game.problem),
        "solvable": True,
        "walkthrough": list(game.walkthrough),
    }
    if texts is None:
        data["instruction"] = game.instruction  # AlfWorld's files have it in the grammar alone
    write_json(folder / GAME_FILE, data)
    light = goal.word == "light"
    write_json(
        folder / TRAJECTORY_FILE,
        {
            "task_id": folder.name,
            "task_type": goal.kind,
            "scene": {"floor_plan": f"FloorPlan{room.scene}", "scene_num": room.scene},
            "pddl_params": {
                "object_target": SPELLING[goal.object],
                "parent_target": "" if light else SPELLING[goal.target],
                "toggle_target": SPELLING[goal.target] if light else "",
                "mrecep_target": "",
                "object_sliced": goal.sliced,
            },
            "turk_annotations": {"anns": [{"task_desc": game.instruction, "high_descs": []}]},
        },
    )
