"""The state of a household, what actions do to it and what the agent is told, exactly as AlfWorld on TextWorld does.

Written from the rules of AlfWorld's planning domain and text grammar; tests/environments/test_alfworld_engine.py
compares it with the engine command for command. The less obvious rules:

* Walking to where the agent already is does nothing, so it is no command.
* Only the object in hand can be examined: the engine never finds the domain's other case applicable.
* Heating, cooling and cleaning need the object in hand at the appliance, which may be closed.
* Slicing needs a knife in hand and the object *at the location*, even inside a closed receptacle. Objects have a
  location of their own (`spots`), which in AlfWorld's games is not always that of their receptacle.
* A lamp can be switched wherever it is, even in a closed drawer; once switched it counts as on for ever.
* "Next to it" lists what was taken out of one receptacle and put down in another at the same location.
* `look` from where no receptacle is lists nothing, although the first observation lists every receptacle.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from rla_lightning.environments.alfred.scene import APPLIANCES, KNIVES, Ability, Action, Goal, Scene

NOTHING_HAPPENS = "Nothing happens."
WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
HELP = """\
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

    scene: Scene
    at: str  # a location
    held: str = ""  # an object or ""
    contents: dict[str, list[str]] = field(default_factory=dict)  # receptacle -> objects in it, in listing order
    opened: set[str] = field(default_factory=set)  # openable receptacles that are open
    clean: set[str] = field(default_factory=set)
    hot: set[str] = field(default_factory=set)
    cool: set[str] = field(default_factory=set)
    sliced: set[str] = field(default_factory=set)
    toggled: set[str] = field(default_factory=set)  # lamps that have been switched
    spots: set[tuple[str, str]] = field(default_factory=set)  # (object, location): where it can be sliced
    left: set[tuple[str, str]] = field(default_factory=set)  # (object, receptacle) it was taken from, last thing known of the two

    def copy(self) -> World:
        return World(
            self.scene,
            self.at,
            self.held,
            {receptacle: names.copy() for receptacle, names in self.contents.items()},
            self.opened.copy(),
            self.clean.copy(),
            self.hot.copy(),
            self.cool.copy(),
            self.sliced.copy(),
            self.toggled.copy(),
            self.spots.copy(),
            self.left.copy(),
        )

    @property
    def places(self) -> dict[str, str]:
        """Object -> a receptacle that it is in; objects that are in none are missing."""
        return {name: receptacle for receptacle, names in self.contents.items() for name in names}

    def is_shut(self, receptacle: str) -> bool:
        return receptacle in self.scene.openable and receptacle not in self.opened

    def put(self, name: str, receptacle: str) -> None:
        """Add the object to the receptacle's contents, at its place in listings."""
        names = self.contents.setdefault(receptacle, [])
        if name not in names:
            insort(names, name, key=self.scene.rank.__getitem__)

    @property
    def states(self) -> dict[Ability, set[str]]:
        """The objects to which something has been done that still shows."""
        return {"clean": self.clean, "heat": self.hot, "cool": self.cool, "slice": self.sliced, "toggle": self.toggled}

    def apply(self, action: Action) -> None:
        """Change the state by an admissible action."""
        verb, item, place = action
        if verb == "go":
            self.at = self.scene.location_of[place]
        elif verb == "open":
            self.opened.add(place)
        elif verb == "close":
            self.opened.discard(place)
        elif verb == "take":
            self.contents[place].remove(item)
            self.held = item
            self.spots.discard((item, self.at))
            self.left.add((item, place))
        elif verb == "move":
            self.put(item, place)
            self.held = ""
            self.spots.add((item, self.at))
            self.left.discard((item, place))
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
    """Whether the goal holds now. As in AlfWorld, what has been done to an object counts only if it can be done to it."""
    scene, contents = world.scene, world.contents
    if goal.word == "light":
        if scene.type_of.get(world.held) != goal.object or (goal.sliced and not _shows(world, world.held, "slice")):
            return False
        here = [name for receptacle in scene.receptacles_at(world.at) for name in contents.get(receptacle, ())]
        return any(scene.type_of[name] == goal.target and _shows(world, name, "toggle") for name in here)
    for receptacle in scene.of_type(goal.target):
        there = [name for name in contents.get(receptacle, ()) if scene.type_of[name] == goal.object]
        if goal.sliced:
            there = [name for name in there if _shows(world, name, "slice")]
        if goal.process is not None:
            there = [name for name in there if _shows(world, name, goal.process)]
        if len(there) >= goal.count:
            return True
    return False


def _shows(world: World, name: str, ability: Ability) -> bool:
    return name in world.states[ability] and ability in world.scene.objects[name].can


def admissible(world: World, noticed: Container[str] | None = None) -> dict[str, Action]:
    """Every admissible command and its action, unsorted.

    Args:
        world: the state.
        noticed: the only objects that commands may name besides the one in hand; None: no restriction.
    """
    scene, at, held = world.scene, world.at, world.held
    actions = scene.moves(at).copy()
    if held:
        actions[f"examine {held}"] = ("examine", held, "")
    for place in scene.receptacles_at(at):
        actions[f"examine {place}"] = ("examine", "", place)
        shut = False
        if place in scene.openable:
            shut = place not in world.opened
            verb = "open" if shut else "close"
            actions[f"{verb} {place}"] = (verb, "", place)
        for name in world.contents.get(place, ()):
            if noticed is not None and name not in noticed:
                continue
            can = scene.objects[name].can
            if "toggle" in can:
                actions[f"use {name}"] = ("use", name, "")
            if not shut and not held and "pickup" in can:
                actions[f"take {name} from {place}"] = ("take", name, place)
        if held:
            if not shut and scene.accepts(place, held):
                actions[f"move {held} to {place}"] = ("move", held, place)
            process = APPLIANCES.get(scene.receptacles[place].type)
            if process is not None and process in scene.objects[held].can:
                actions[f"{process} {held} with {place}"] = (process, held, place)
    if held and scene.objects[held].type in KNIVES:
        near = [name for name in scene.sliceable if (name, at) in world.spots and (noticed is None or name in noticed)]
        actions |= {f"slice {name} with {held}": ("slice", name, held) for name in near}
    return actions


def join(words: Sequence[str]) -> str:
    """In the grammar's way: "a, b, and c", and also "a, and b"."""
    if not words:
        return "nothing"
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", and " + words[-1]


def listing(names: Sequence[str]) -> str:
    """In AlfWorld's dialect: a apple 1, a cup 2, and a pen 1."""
    return join([f"a {name}" for name in names])


def receptacle_text(world: World, receptacle: str, mentioned: Sequence[str] | None = None) -> str:
    """What a receptacle looks like; when `mentioned` is given, only those objects in it are told of."""
    if receptacle in world.scene.openable and receptacle not in world.opened:
        return f"The {receptacle} is closed."
    names = world.contents.get(receptacle, ()) if mentioned is None else mentioned
    if receptacle not in world.scene.openable:
        return f"On the {receptacle}, you see {listing(names)}."
    return f"The {receptacle} is open. In it, you see {listing(names)}."


def look_text(world: World, at_start: bool = False) -> str:
    """What looking around tells, or the room's description at the start."""
    scene = world.scene
    here = scene.receptacles_at(world.at)
    if not here:
        seen = listing(list(scene.receptacles)) if at_start else "nothing"
        return f"You are in the middle of a room. Looking quickly around you, you see {seen}."
    loose = [name for name in scene.objects for place in here if (name, place) in world.left and (name, world.at) in world.spots]
    return f"You are facing the {join(here)}. Next to it, you see {listing(loose)}."


def object_text(world: World, name: str) -> str:
    thing = world.scene.objects[name]
    if thing.inside is not None:
        return f"This is a normal {name}. In it, you see {listing(thing.inside)}."
    clean, hot, cool, sliced = (name in states for states in (world.clean, world.hot, world.cool, world.sliced))
    if clean or hot or cool:
        # The grammar says "cold" only for an object that is cool and nothing else.
        temperature = "hot" if hot else ("cool" if clean or sliced else "cold") if cool else ""
        states = " and ".join(word for word in (temperature, "clean" if clean else "") if word)
        return f"This is a {states} {'sliced ' if sliced else ''}{name}."
    if "toggle" in thing.can and name in world.toggled:
        return f"This {name} is on."
    if "slice" in thing.can and sliced:
        return f"This is a sliced {name}."
    return f"There's nothing special about {name}."


def feedback(world: World, action: Action, mentioned: Sequence[str] | None = None) -> str:
    """AlfWorld's sentence for an action that has just been applied; `mentioned` as in `receptacle_text`."""
    verb, item, place = action
    if verb in _SHOWS and not item:
        return _SHOWS[verb].format(r=place) + receptacle_text(world, place, mentioned)
    if verb == "examine":
        return object_text(world, item)
    if verb == "inventory":
        return f"You are carrying: a {world.held}." if world.held else "You are not carrying anything."
    if verb == "look":
        return look_text(world)
    return _SENTENCES[verb].format(o=item, r=place)


def first_text(world: World, instruction: str) -> str:
    """The first observation; the instruction without its full stop."""
    return f"{WELCOME}\n\n{look_text(world, at_start=True)}\n\nYour task is to: {instruction}."
