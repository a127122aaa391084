"""The state of a household and what actions do to it, with ALFRED's semantics and AlfWorld's texts.

Two departures from AlfWorld, both to keep hidden things hidden: an object can be acted on only once it
has been noticed, and slicing needs the object in view (there, an unopened receptacle suffices).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rla_lightning.environments.household.affordances import (
    CLEANABLE,
    COOLABLE,
    FITS,
    HEATABLE,
    LAMP,
    MIDDLE,
    OPENABLE,
    SLICEABLE,
    TYPE,
    Goal,
)

Action = tuple[str, str, str]  # verb, object or "", receptacle (or tool) or ""

_PROCESS = {  # appliance type -> verb, what it works on
    "microwave": ("heat", HEATABLE),
    "fridge": ("cool", COOLABLE),
    "sinkbasin": ("clean", CLEANABLE),
}
NOTHING_HAPPENS = "Nothing happens."
HELP = """
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
_SHOWS = {"go": "You arrive at {r}. ", "open": "You open the {r}. ", "examine": ""}  # then what is in it
_SENTENCES = {
    "close": "You close the {r}.",
    "take": "You pick up the {o} from the {r}.",
    "move": "You move the {o} to the {r}.",
    "heat": "You heat the {o} using the {r}.",
    "cool": "You cool the {o} using the {r}.",
    "clean": "You clean the {o} using the {r}.",
    "slice": "You sliced the {o} with the {r}.",
    "use": "You turn on the {o}.",
    "help": HELP,
}


@dataclass(slots=True)
class World:
    """The changing part of a scene, or an agent's belief about it."""

    at: str  # a receptacle or MIDDLE
    held: str  # an object or ""
    places: dict[str, str]  # object -> receptacle, for every object that is not held
    opened: set[str]  # openable receptacles that are open
    clean: set[str]
    hot: set[str]
    cool: set[str]
    sliced: set[str]
    toggled: set[str]  # lamps that have been switched; like ALFRED's isToggled it is never unset

    def copy(self) -> World:
        return World(
            self.at,
            self.held,
            self.places.copy(),
            self.opened.copy(),
            self.clean.copy(),
            self.hot.copy(),
            self.cool.copy(),
            self.sliced.copy(),
            self.toggled.copy(),
        )

    def is_shut(self, receptacle: str) -> bool:
        return receptacle in OPENABLE and receptacle not in self.opened

    def contents(self, receptacle: str) -> list[str]:
        return sorted(name for name, place in self.places.items() if place == receptacle)

    def state_set(self, word: str) -> set[str]:
        """The objects on which "clean", "heat" or "cool" has been done and still shows."""
        return {"clean": self.clean, "heat": self.hot, "cool": self.cool}[word]

    def apply(self, action: Action) -> None:
        """Change the state by an admissible action."""
        verb, item, place = action
        if verb == "go":
            self.at = place
        elif verb == "open":
            self.opened.add(place)
        elif verb == "close":
            self.opened.discard(place)
        elif verb == "take":
            del self.places[item]
            self.held = item
        elif verb == "move":
            self.places[item] = place
            self.held = ""
        elif verb == "heat":
            self.hot.add(item)
            self.cool.discard(item)
        elif verb == "cool":
            self.cool.add(item)
            self.hot.discard(item)
        elif verb == "clean":
            self.clean.add(item)
        elif verb == "slice":
            self.sliced.add(item)
        elif verb == "use":
            self.toggled.add(item)


def is_won(goal: Goal, world: World) -> bool:
    """Whether the goal holds now."""
    word, places = goal.word, world.places
    if word == "light":
        return LAMP in world.toggled and places.get(LAMP) == world.at and TYPE.get(world.held) == goal.object
    there = [name for name, place in places.items() if TYPE[name] == goal.object and TYPE[place] == goal.target]
    if word == "put":
        return bool(there)
    if word == "two":  # both in the same receptacle
        return len({places[name] for name in there}) < len(there)
    done = world.state_set(word)
    return any(name in done for name in there)


def admissible(world: World, receptacles: Sequence[str], noticed: Iterable[str]) -> dict[str, Action]:
    """Every admissible command and its action; `noticed` are the objects that the agent knows to be in view here."""
    at, held = world.at, world.held
    actions: dict[str, Action] = {f"go to {r}": ("go", "", r) for r in receptacles if r != at}
    actions["look"] = ("look", "", "")
    actions["inventory"] = ("inventory", "", "")
    actions["help"] = ("help", "", "")
    if held:
        actions[f"examine {held}"] = ("examine", held, "")
    if at == MIDDLE:
        return actions
    actions[f"examine {at}"] = ("examine", "", at)
    place_type = TYPE[at]
    if at in OPENABLE:
        verb = "close" if at in world.opened else "open"
        actions[f"{verb} {at}"] = (verb, "", at)
    for name in noticed:
        actions[f"examine {name}"] = ("examine", name, "")
        if name == LAMP:
            actions[f"use {name}"] = ("use", name, "")
        elif not held:
            actions[f"take {name} from {at}"] = ("take", name, at)
        elif TYPE[held] == "knife" and TYPE[name] in SLICEABLE:
            actions[f"slice {name} with {held}"] = ("slice", name, held)
    if held:
        if TYPE[held] in FITS[place_type] and not world.is_shut(at):
            actions[f"move {held} to {at}"] = ("move", held, at)
        verb, usable = _PROCESS.get(place_type, ("", frozenset()))
        if TYPE[held] in usable:
            actions[f"{verb} {held} with {at}"] = (verb, held, at)
    return actions


def listing(names: Sequence[str]) -> str:
    """In AlfWorld's dialect: a apple 1, a cup 2, and a pen 1."""
    words = [f"a {name}" for name in names]
    if not words:
        return "nothing"
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", and " + words[-1]


def receptacle_text(world: World, mentioned: Sequence[str]) -> str:
    """What the receptacle in front of the agent looks like when only `mentioned` objects are noticed."""
    at = world.at
    if at not in OPENABLE:
        return f"On the {at}, you see {listing(mentioned)}."
    if at not in world.opened:
        return f"The {at} is closed."
    return f"The {at} is open. In it, you see {listing(mentioned)}."


def look_text(world: World, receptacles: Sequence[str]) -> str:
    if world.at == MIDDLE:
        return f"You are in the middle of a room. Looking quickly around you, you see {listing(receptacles)}."
    return f"You are facing the {world.at}. Next to it, you see nothing."


def object_text(world: World, name: str) -> str:
    if name == LAMP:
        return f"This {name} is {'on' if name in world.toggled else 'off'}."
    clean, hot, cool = name in world.clean, name in world.hot, name in world.cool
    sliced = "sliced " if name in world.sliced else ""
    if not (clean or hot or cool or sliced):
        return f"There's nothing special about {name}."
    # The grammar says "cold" only for an object that is cool and nothing else.
    temperature = "hot" if hot else ("cool" if clean or sliced else "cold") if cool else ""
    states = " and ".join(word for word in (temperature, "clean" if clean else "") if word)
    return f"This is a {states + ' ' if states else ''}{sliced}{name}."


def feedback(world: World, action: Action, receptacles: Sequence[str], mentioned: Sequence[str]) -> str:
    """AlfWorld's sentence for an action that has just been applied."""
    verb, item, place = action
    if verb in _SHOWS and not item:
        return _SHOWS[verb].format(r=place) + receptacle_text(world, mentioned)
    if verb == "examine":
        return object_text(world, item)
    if verb == "inventory":
        return f"You are carrying: a {world.held}." if world.held else "You are not carrying anything."
    if verb == "look":
        return look_text(world, receptacles)
    return _SENTENCES[verb].format(o=item, r=place)
