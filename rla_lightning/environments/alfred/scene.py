"""What does not change while a household is played: its receptacles, objects, what fits where, and the goal.

Types and names are lower case as in AlfWorld's texts ("cabinet 4" is of type cabinet). Terms and task kinds are
those of ALFRED (Shridhar et al. 2020, arXiv 1912.01734) and AlfWorld (Shridhar et al. 2021, arXiv 2010.03768).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

VERBS = ("go", "open", "close", "take", "move", "heat", "cool", "clean", "slice", "use", "examine", "look", "inventory", "help")
Action = tuple[str, str, str]  # verb, object or "", receptacle (or tool) or ""
Ability = Literal["pickup", "heat", "cool", "clean", "slice", "toggle"]

APPLIANCES: Mapping[str, Ability] = {"microwave": "heat", "fridge": "cool", "sinkbasin": "clean"}  # receptacle type -> verb
KNIVES = frozenset({"knife", "butterknife"})

KIND_WORDS: Mapping[str, str] = {  # ALFRED's task kinds -> the one word that digests use
    "pick_and_place_simple": "put",
    "look_at_obj_in_light": "light",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}
GOAL_KINDS: tuple[str, ...] = tuple(KIND_WORDS)


@dataclass(frozen=True)
class Goal:
    """What has to hold in the end."""

    kind: str  # one of GOAL_KINDS
    object: str  # a type
    target: str  # a receptacle type; of a light goal the type of the lamp
    sliced: bool = False  # the object has to be sliced

    @property
    def word(self) -> str:
        return KIND_WORDS[self.kind]

    @property
    def process(self) -> Ability | None:
        """What has to be done to the object before it is put away; None for most kinds."""
        return next((verb for verb in APPLIANCES.values() if verb == self.word), None)

    @property
    def count(self) -> int:
        """Objects of the type that the goal needs."""
        return 2 if self.word == "two" else 1


@dataclass(frozen=True)
class Receptacle:
    """Where objects lie; it never moves."""

    type: str
    location: str  # where the agent stands when it is there; several receptacles may share one
    is_openable: bool = False


@dataclass(frozen=True)
class Thing:
    """An object."""

    type: str
    can: frozenset[Ability]
    inside: tuple[str, ...] | None = None  # of a movable receptacle: what its description lists; None for others


@dataclass(frozen=True)
class Scene:
    """The fixed part of a household.

    Attributes:
        receptacles: by name, in the order in which texts list them.
        objects: by name, in the order in which texts list them.
        fits: receptacle type -> object types that can be put there.
    """

    receptacles: Mapping[str, Receptacle]
    objects: Mapping[str, Thing]
    fits: Mapping[str, frozenset[str]]

    @cached_property
    def rank(self) -> Mapping[str, int]:
        """Place of each object in listings."""
        return {name: i for i, name in enumerate(self.objects)}

    @cached_property
    def type_of(self) -> Mapping[str, str]:
        """Of receptacles and objects."""
        kinds = {name: receptacle.type for name, receptacle in self.receptacles.items()}
        return kinds | {name: thing.type for name, thing in self.objects.items()}

    @cached_property
    def location_of(self) -> Mapping[str, str]:
        return {name: receptacle.location for name, receptacle in self.receptacles.items()}

    @cached_property
    def openable(self) -> frozenset[str]:
        return frozenset(name for name, receptacle in self.receptacles.items() if receptacle.is_openable)

    @cached_property
    def sliceable(self) -> tuple[str, ...]:
        return tuple(name for name, thing in self.objects.items() if "slice" in thing.can)

    @cached_property
    def _by_type(self) -> Mapping[str, tuple[str, ...]]:
        groups: dict[str, tuple[str, ...]] = {}
        for name, kind in self.type_of.items():
            groups[kind] = (*groups.get(kind, ()), name)
        return groups

    @cached_property
    def _by_location(self) -> Mapping[str, tuple[str, ...]]:
        groups: dict[str, tuple[str, ...]] = {}
        for name, receptacle in self.receptacles.items():
            groups[receptacle.location] = (*groups.get(receptacle.location, ()), name)
        return groups

    @cached_property
    def _moves(self) -> dict[str, dict[str, Action]]:
        return {}  # filled by `moves`, one entry per location that is asked for

    def of_type(self, kind: str) -> tuple[str, ...]:
        """Names of the receptacles (or objects) of a type."""
        return self._by_type.get(kind, ())

    def receptacles_at(self, location: str) -> tuple[str, ...]:
        return self._by_location.get(location, ())

    def moves(self, location: str) -> dict[str, Action]:
        """The commands that are always there and those that lead away from a location; not to be changed."""
        known = self._moves.get(location)
        if known is None:
            known = {f"go to {name}": ("go", "", name) for name, place in self.location_of.items() if place != location}
            known |= {word: (word, "", "") for word in ("look", "inventory", "help")}
            self._moves[location] = known
        return known

    def accepts(self, receptacle: str, object_name: str) -> bool:
        """Whether the object can be put into the receptacle, were it open."""
        return self.objects[object_name].type in self.fits.get(self.receptacles[receptacle].type, ())
