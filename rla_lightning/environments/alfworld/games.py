"""AlfWorld's game files: the folder they lie in, one file read into a scene, and one written."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rla_lightning.environments.alfred.scene import GOAL_KINDS, Ability, Receptacle, Scene, Thing
from rla_lightning.environments.alfred.world import World
from rla_lightning.environments.alfworld.pddl import GameError, Problem, parse_problem
from rla_lightning.types import ConfigError

GAME_FILE, TRAJECTORY_FILE = "game.tw-pddl", "traj_data.json"
SUBFOLDERS = ("train", "valid_seen", "valid_unseen")
GOAL_SENTENCE = "UNKNOWN GOAL"  # in AlfWorld's grammar, where a game's instruction belongs
DIALECTS = frozenset(  # fingerprints of the domain and the grammar that the simulator speaks: AlfWorld 0.4's
    {
        "6cbbf3d0d19be02716db87fd6ef0fe64bfd8256a71e9d4553dc79dadc82fcc8c",
        "5cf25471b067d306b6699ab2321a2047174a065c214e7998e732fe88b2b24cc5",
    }
)
_ABILITIES: Mapping[str, Ability] = {
    "pickupable": "pickup",
    "heatable": "heat",
    "coolable": "cool",
    "cleanable": "clean",
    "sliceable": "slice",
    "toggleable": "toggle",
}
_INSTRUCTION = re.compile(r'Your task is to: (.*?)\.?"')


@dataclass(frozen=True)
class Game:
    """One game as it starts.

    Attributes:
        problem: what the file says.
        scene: the fixed part of it.
        start: the first state; never changed, episodes play copies.
        instruction: what the agent is told to do, without the full stop.
        names: entity -> the name that texts and commands use, of receptacles and objects.
        walkthrough: commands that win, from the file.
    """

    problem: Problem
    scene: Scene
    start: World
    instruction: str
    names: Mapping[str, str]
    walkthrough: tuple[str, ...] = ()


@dataclass(frozen=True)
class GameEntry:
    """Where a game lies and what its folder's name says about it."""

    path: str  # of game.tw-pddl, relative to the root
    kind: str
    scene: str  # ALFRED's number of the room, "" when the folder's name has none


@dataclass(frozen=True)
class GameFolder:
    """The games of a data folder that look usable, and why others do not."""

    root: Path
    games: Mapping[str, tuple[GameEntry, ...]]  # by subfolder, sorted by path
    skipped: Mapping[str, int]  # reason -> how many


# One game


def names_of(problem: Problem) -> dict[str, str]:
    """AlfWorld's names: entities of a type are numbered from the last id to the first, and a basin says so."""
    ids = sorted({argument for fact in problem.facts for argument in fact[1:]})  # only what occurs in a fact exists
    kinds = {entity: entity.partition("_bar_")[0] + ("basin" if "basin" in entity else "") for entity in ids if "_bar_" in entity}
    left = Counter(kinds.values())
    names = {}
    for entity in ids:
        if entity in kinds:
            names[entity] = f"{kinds[entity]} {left[kinds[entity]]}"
            left[kinds[entity]] -= 1
        elif problem.objects.get(entity) in ("receptacle", "object"):
            raise GameError(f"{entity!r} is not named in AlfWorld's way")  # the engine cannot tell such names from others
    return {entity: name for entity, name in names.items() if problem.objects.get(entity) in ("receptacle", "object")}


def game_of(problem: Problem, instruction: str, walkthrough: Sequence[str] = ()) -> Game:
    """The problem as a scene and its first state; listings are in the order of the entities' ids."""
    facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for fact in sorted(problem.facts):
        facts[fact[0]].append(fact[1:])
    names = names_of(problem)
    openable = {entity for (entity,) in facts["openable"]}
    types = {entity: kind.removesuffix("type") for entity, kind in [*facts["receptacletype"], *facts["objecttype"]]}
    receptacles = {
        names[entity]: Receptacle(types.get(entity, ""), location, entity in openable)
        for entity, location in facts["receptacleatlocation"]
    }
    if len(receptacles) != len(facts["receptacleatlocation"]):
        raise GameError("a receptacle is at two locations")
    abilities: defaultdict[str, set[Ability]] = defaultdict(set)
    for predicate, ability in _ABILITIES.items():
        for (entity,) in facts[predicate]:
            abilities[entity].add(ability)
    inside: dict[str, list[str]] = {entity: [] for (entity,) in facts["isreceptacleobject"]}
    for entity, outer in facts["inreceptacleobject"]:
        inside.setdefault(outer, []).append(names[entity])
    objects = {
        names[entity]: Thing(
            types.get(entity, ""),
            frozenset(abilities[entity]),
            tuple(inside[entity]) if (entity,) in facts["isreceptacleobject"] else None,
        )
        for entity in sorted(names)
        if problem.objects[entity] == "object"
    }
    fits: defaultdict[str, set[str]] = defaultdict(set)
    for outer, kind in facts["cancontain"]:
        fits[outer.removesuffix("type")].add(kind.removesuffix("type"))
    scene = Scene(receptacles, objects, {kind: frozenset(fitting) for kind, fitting in fits.items()})
    return Game(problem, scene, _start(scene, facts, names), instruction, names, tuple(walkthrough))


def _start(scene: Scene, facts: Mapping[str, list[tuple[str, ...]]], names: Mapping[str, str]) -> World:
    if len(facts["atlocation"]) != 1:
        raise GameError("the agent is not at one location")
    world = World(scene, facts["atlocation"][0][1])
    for entity, place in facts["inreceptacle"]:
        world.put(names[entity], names[place])
    world.spots.update((names[entity], location) for entity, location in facts["objectatlocation"])
    for predicate, states in (
        ("opened", world.opened),
        ("isclean", world.clean),
        ("ishot", world.hot),
        ("iscool", world.cool),
        ("issliced", world.sliced),
        ("istoggled", world.toggled),
    ):
        states.update(names[entity] for (entity,) in facts[predicate])
    for _, entity in facts["holds"]:
        world.held = names[entity]
    return world


def read_game(path: Path, known_dialect_only: bool = True) -> Game:
    """Read a game.tw-pddl; GameError says why it cannot be used.

    Args:
        path: of the file.
        known_dialect_only: refuse games whose rules or texts the simulator does not speak.
    """
    data = _read_json(path)
    if "solvable" not in data:
        raise GameError("nobody has checked that the game is solvable")
    if not data["solvable"]:
        raise GameError("unsolvable")
    domain, grammar, problem = _texts_of(data)
    if known_dialect_only:
        for text, what in ((domain, "planning domain"), (grammar, "texts")):
            if text and fingerprint(text) not in DIALECTS:
                raise GameError(f"the {what} of another AlfWorld version: use backend textworld")
    instruction = str(data.get("instruction", "")) or instruction_of(grammar)
    if not instruction:
        raise GameError("the game has no instruction")
    try:
        return game_of(parse_problem(problem), instruction, data.get("walkthrough") or ())
    except (KeyError, IndexError, TypeError) as error:
        raise GameError(f"the problem is malformed ({type(error).__name__}: {error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise GameError(f"no {path.name}") from None
    except ValueError:
        raise GameError(f"{path.name} is not JSON") from None
    if not isinstance(data, dict):
        raise GameError(f"{path.name} is not a JSON object")
    return data


def _texts_of(data: Mapping[str, Any]) -> tuple[str, str, str]:
    texts = tuple(data.get(name) for name in ("pddl_domain", "grammar", "pddl_problem"))
    if not all(isinstance(text, str) for text in texts):
        raise GameError("pddl_domain, grammar or pddl_problem is missing")
    return texts[0], texts[1], texts[2]  # type: ignore[return-value]


def instruction_of(grammar: str) -> str:
    """What a game's grammar tells the agent to do, without the full stop; "" when it says nothing."""
    found = _INSTRUCTION.search(grammar)
    return "" if found is None or found[1] == GOAL_SENTENCE else found[1]


def fingerprint(text: str) -> str:
    """Of a domain or grammar, apart from comments, white space and the instruction."""
    text = re.sub(r"(?m)^\s*;.*$|;[^\n\"]*$", "", text)
    text = _INSTRUCTION.sub("", text)
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()


# A folder of games


def index_games(root: Path, kinds: Sequence[str] = GOAL_KINDS) -> GameFolder:
    """The games below a folder, from names and the files beside them; the games themselves are not read yet."""
    base = root / "json_2.1.1" if (root / "json_2.1.1").is_dir() else root
    if not any((base / name).is_dir() for name in SUBFOLDERS):
        hint = "build games there with: rla games " + str(root) + " --number 256"
        raise ConfigError(f"alfworld: {str(root)!r} has none of the folders {', '.join(SUBFOLDERS)}; {hint}")
    skipped: Counter[str] = Counter()
    games: dict[str, tuple[GameEntry, ...]] = {}
    for subfolder in SUBFOLDERS:
        entries = []
        for folder, _, files in os.walk(base / subfolder):
            if TRAJECTORY_FILE not in files and GAME_FILE not in files:
                continue
            task = Path(folder).parent.name
            kind, _, rest = task.partition("-")
            reason = _unusable(files, kind, kinds)
            if reason:
                skipped[reason] += 1
            else:
                path = (Path(folder) / GAME_FILE).relative_to(base)
                entries.append(GameEntry(path.as_posix(), kind, rest.rpartition("-")[2]))
        games[subfolder] = tuple(sorted(entries, key=lambda entry: entry.path))
    return GameFolder(base, games, dict(skipped))


def _unusable(files: Sequence[str], kind: str, kinds: Sequence[str]) -> str:
    if "movable" in kind:
        return "movable receptacles are not supported"
    if kind not in GOAL_KINDS:
        return "an unknown kind of task"
    if kind not in kinds:
        return "a kind of task that is left out"
    return "" if GAME_FILE in files else f"no {GAME_FILE}"


# The engine's texts


def engine_texts() -> tuple[str, str] | None:
    """Domain and grammar of the installed AlfWorld; None without it."""
    spec = find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        return None
    data = Path(next(iter(spec.submodule_search_locations))) / "data"
    return (data / "alfred.pddl").read_text(encoding="utf-8"), (data / "alfred.twl2").read_text(encoding="utf-8")


def read_engine_texts(path: Path, instruction: str | None = None) -> dict[str, str]:
    """What the engine loads of a game file, with another instruction when one is given.

    Games that were built without AlfWorld installed have no domain and grammar: the installed ones are used.
    """
    data = _read_json(path)
    domain, grammar, problem = _texts_of(data)
    own = str(data.get("instruction", "")) or instruction_of(grammar)
    if not domain or not grammar:
        installed = engine_texts()
        if installed is None:
            raise ConfigError(f"{path} has no texts for the engine: pip install 'rla_lightning[alfworld]'")
        domain, grammar = installed
    return {"pddl_domain": domain, "grammar": with_instruction(grammar, instruction or own), "pddl_problem": problem}


def with_instruction(grammar: str, instruction: str) -> str:
    return _INSTRUCTION.sub(lambda _: f'Your task is to: {instruction}."', grammar)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """All of the file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)
