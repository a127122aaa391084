"""What exists in the household: receptacles, objects, what fits where and what can be done to what.

Names, affordances and goal kinds are a subset of ALFRED's (Shridhar et al. 2020, arXiv 1912.01734), small
enough that a word-level vocabulary of the whole world stays below 300 words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rla_lightning.environments.alfred.scene import KIND_WORDS, Ability, Goal

LAMP_TYPE = "desklamp"
LAMP = "desklamp 1"
MAX_COPIES = 3  # objects of one type in one scene

_FOOD = frozenset({"apple", "egg", "potato", "tomato", "bread", "lettuce"})
_DISHES = frozenset({"bowl", "cup", "mug", "plate"})
_CUTLERY = frozenset({"knife", "fork", "spoon"})
_POCKET = frozenset({"cellphone", "keychain", "pen", "creditcard"})
_WASH = frozenset({"soapbar", "cloth"})
_BOOK = frozenset({"book"})
_ALL = _FOOD | _DISHES | _CUTLERY | _POCKET | _WASH | _BOOK

OBJECT_TYPES: tuple[str, ...] = tuple(sorted(_ALL))

FITS: Mapping[str, frozenset[str]] = {  # receptacle type -> object types it can hold
    "cabinet": _DISHES | _WASH | _BOOK,
    "coffeetable": _ALL,
    "countertop": _ALL,
    "desk": _DISHES | _POCKET | _BOOK | {"cloth"},
    "diningtable": _ALL,
    "drawer": _CUTLERY | _POCKET | _WASH | _BOOK,
    "dresser": _DISHES | _POCKET | _BOOK | {"cloth"},
    "fridge": _FOOD | _DISHES,
    "garbagecan": _FOOD | _WASH | {"pen"},
    "microwave": (_FOOD - {"lettuce"}) | _DISHES,
    "shelf": _DISHES | _POCKET | _WASH | _BOOK,
    "sidetable": _ALL,
    "sinkbasin": (_FOOD - {"bread"}) | _DISHES | _CUTLERY | _WASH,
    "sofa": (_POCKET - {"pen"}) | _BOOK | {"cloth"},
}
RECEPTACLE_LIMITS: Mapping[str, int] = {  # how many of a type one scene can have
    "cabinet": 4,
    "coffeetable": 1,
    "countertop": 2,
    "desk": 1,
    "diningtable": 1,
    "drawer": 3,
    "dresser": 1,
    "fridge": 1,
    "garbagecan": 1,
    "microwave": 1,
    "shelf": 3,
    "sidetable": 2,
    "sinkbasin": 1,
    "sofa": 1,
}
OPENABLE_TYPES = frozenset({"cabinet", "drawer", "fridge", "microwave"})
LAMP_HOLDERS = ("desk", "dresser", "sidetable")

HEATABLE = (_FOOD - {"lettuce"}) | (_DISHES - {"bowl"})
COOLABLE = _FOOD | _DISHES
CLEANABLE = (_FOOD - {"bread"}) | _DISHES | _CUTLERY | _WASH
SLICEABLE = _FOOD
PROCESS_APPLIANCE: Mapping[str, str] = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
PROCESSABLE: Mapping[str, frozenset[str]] = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
_ABLE: Mapping[Ability, frozenset[str]] = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE, "slice": SLICEABLE}


def type_of(name: str) -> str:
    """Of cabinet 2: cabinet."""
    return name.partition(" ")[0]


RECEPTACLE_NAMES: tuple[str, ...] = tuple(f"{t} {i}" for t, n in RECEPTACLE_LIMITS.items() for i in range(1, n + 1))
OBJECT_NAMES: tuple[str, ...] = (*(f"{t} {i}" for t in OBJECT_TYPES for i in range(1, MAX_COPIES + 1)), LAMP)
# Look-ups by entity name: string splitting at every step would dominate the run time.
TYPE: Mapping[str, str] = {name: type_of(name) for name in RECEPTACLE_NAMES + OBJECT_NAMES}
OPENABLE = frozenset(name for name in RECEPTACLE_NAMES if TYPE[name] in OPENABLE_TYPES)


_INSTRUCTIONS: Mapping[str, str] = {
    "put": "put some {o} on {r}",
    "light": "look at {o} under the {r}",
    "clean": "put a clean {o} in {r}",
    "heat": "put a hot {o} in {r}",
    "cool": "put a cool {o} in {r}",
    "two": "put two {o} in {r}",
}


def instruction_of(goal: Goal) -> str:
    return _INSTRUCTIONS[goal.word].format(o=goal.object, r=goal.target)


def abilities_of(object_type: str) -> frozenset[Ability]:
    if object_type == LAMP_TYPE:
        return frozenset({"toggle"})
    able: set[Ability] = {"pickup"}
    able |= {ability for ability, kinds in _ABLE.items() if object_type in kinds}
    return frozenset(able)


def is_held_out(object_type: str, target_type: str) -> bool:
    """Whether goals with this pair are kept for the out-of-distribution split (about one pair in five)."""
    return hashlib.sha256(f"{object_type} {target_type}".encode()).digest()[0] % 5 == 0


def legal_pairs(kind: str) -> tuple[tuple[str, str], ...]:
    """(object type, target type) of every goal of a kind, both splits."""
    word = KIND_WORDS[kind]
    if word == "light":
        return tuple((o, LAMP_TYPE) for o in OBJECT_TYPES if any(o in FITS[r] for r in LAMP_HOLDERS))
    usable = PROCESSABLE.get(word, _ALL)
    # A target that is also the appliance would make "process, then place" one visit: left out, as in ALFRED.
    return tuple(
        (o, r) for r, fitting in FITS.items() if r != PROCESS_APPLIANCE.get(word) for o in sorted(fitting) if o in usable
    )


def split_pairs(kind: str, held_out: bool) -> tuple[tuple[str, str], ...]:
    """The legal pairs of a kind that belong to one of the two splits."""
    return tuple(pair for pair in legal_pairs(kind) if is_held_out(*pair) is held_out)
