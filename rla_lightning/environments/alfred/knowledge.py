"""What the agent knows from its observations, and the digest of it in vocabulary words."""

from __future__ import annotations

from collections.abc import Sequence

from rla_lightning.environments.alfred.scene import APPLIANCES, KNIVES, Goal
from rla_lightning.environments.alfred.world import World

SHOWN_HERE = 3
SHOWN_SEEN = 2
SHOWN_TARGETS = 2
SHOWN_NEW = 5
MIDDLE = "middle"  # where no receptacle is
STATE_WORDS = {"clean": "clean", "heat": "hot", "cool": "cool"}
SLOT_WORDS = ("hold", "at", "here", "seen", "placed", "with", "to", "new")
FILLER_WORDS = ("-", "nothing", "ok", "open", "closed", "on", "off")
CUT_WORDS = ("cut", "sliced")  # where something has to be sliced


def word_of(name: str) -> str:
    """The one word for a name: cabinet_1 for cabinet 1."""
    return name.replace(" ", "_")


class Knowledge:
    """A belief world that only observations fill, plus which receptacles have been looked into.

    Attributes:
        belief: a `World` that holds noticed objects and receptacles known to be open; what the agent
            itself did (heating, cleaning, ...) is shared with the real world.
        facing: the receptacle that the agent last walked to, "" before.
        inspected: receptacles whose contents have been shown. When all have been and a needed object is
            still unknown (observation noise), the search starts over.
    """

    def __init__(self, goal: Goal, real: World) -> None:
        scene = real.scene
        self.goal = goal
        self.receptacles = tuple(scene.receptacles)
        self.targets = scene.of_type(goal.target) if goal.word != "light" else ()
        self.appliance = next((r for r, found in scene.receptacles.items() if APPLIANCES.get(found.type) == goal.word), "")
        self.belief = World(
            scene, real.at, real.held, clean=real.clean, hot=real.hot, cool=real.cool, sliced=real.sliced, toggled=real.toggled
        )
        self.facing = next(iter(scene.receptacles_at(real.at)), "")
        self.inspected: set[str] = set()
        self._note_openness(real)
        self._refresh()

    def update(self, real: World, receptacle: str, mentioned: Sequence[str] | None) -> None:
        """Take in one observation.

        Args:
            real: the world after the action.
            receptacle: the one that the action was about, "" when none.
            mentioned: the objects that the observation said are in it; None when it said nothing about contents.
        """
        belief, scene = self.belief, real.scene
        if belief.held != real.held:
            if belief.held:
                belief.put(belief.held, receptacle)
                belief.spots.add((belief.held, real.at))
            else:
                self._forget(real.held)
            belief.held = real.held
        if belief.at != real.at:
            belief.at, self.facing = real.at, receptacle
        self._note_openness(real)
        if mentioned is not None and not real.is_shut(receptacle):
            for name in mentioned:
                belief.put(name, receptacle)
                belief.spots.update((name, location) for location in (scene.location_of[receptacle],))
            self.inspected.add(receptacle)
        self._refresh()
        if mentioned is not None and self.is_searching and len(self.inspected) == len(self.receptacles):
            self.inspected = {receptacle}

    def _note_openness(self, real: World) -> None:
        for place in real.scene.receptacles_at(real.at):
            if place in real.opened:
                self.belief.opened.add(place)
            else:
                self.belief.opened.discard(place)

    def _forget(self, name: str) -> None:
        for names in self.belief.contents.values():
            if name in names:
                names.remove(name)
        self.belief.spots = {spot for spot in self.belief.spots if spot[0] != name}

    def _refresh(self) -> None:
        """What follows from the belief and is asked for several times per turn."""
        belief, goal, kinds = self.belief, self.goal, self.belief.scene.type_of
        self.places = belief.places
        held = kinds.get(belief.held)
        own = sum(kinds[name] == goal.object for name in self.places) + (held == goal.object)
        self.lamp = next((n for n in self.places if kinds[n] == goal.target), "") if goal.word == "light" else ""
        self.knife = belief.held if held in KNIVES else next((n for n in self.places if kinds[n] in KNIVES), "")
        self.is_searching = own < goal.count or (goal.word == "light" and not self.lamp) or (self._must_cut() and not self.knife)

    def _must_cut(self) -> bool:
        goal, belief, kinds = self.goal, self.belief, self.belief.scene.type_of
        known = [name for name in (*self.places, belief.held) if kinds.get(name) == goal.object]
        return goal.sliced and sum(name in belief.sliced for name in known) < goal.count

    @property
    def noticed(self) -> list[str]:
        """Objects that the agent knows to be in view."""
        belief = self.belief
        here = [place for place in belief.scene.receptacles_at(belief.at) if not belief.is_shut(place)]
        return [name for place in here for name in belief.contents.get(place, ())]

    @property
    def candidates(self) -> list[str]:
        """Receptacles worth inspecting next, at most five, the one in front of the agent first; empty when not searching."""
        if not self.is_searching:
            return []
        new = [r for r in self.receptacles if r not in self.inspected]
        if self.facing in new:
            new.remove(self.facing)
            new.insert(0, self.facing)
        return new[:SHOWN_NEW]

    def is_before_uninspected(self) -> bool:
        """Whether the agent stands before a closed receptacle that it has not looked into."""
        return bool(self.facing) and self.facing not in self.inspected and self.belief.is_shut(self.facing)

    def filled_target(self) -> str:
        """For "two": the target receptacle that already holds one of the objects, or ""."""
        kinds, goal = self.belief.scene.type_of, self.goal
        return min((p for n, p in self.places.items() if kinds[n] == goal.object and kinds[p] == goal.target), default="")

    def digest(self, last_ok: bool) -> tuple[str, ...]:
        """The knowledge as words: fixed slot order, each slot headed by its name."""
        belief, goal, kinds, places = self.belief, self.goal, self.belief.scene.type_of, self.places
        held, word, facing = belief.held, goal.word, self.facing
        words = [word, goal.object, goal.target, "hold"]
        words += (word_of(held), self._state_word(held)) if held else ("nothing", "-")
        state = ("closed" if belief.is_shut(facing) else "open") if facing in belief.scene.openable else "-"
        words += ("at", word_of(facing) or MIDDLE, state)
        filled = self.filled_target() if word == "two" else ""
        open_goals = [n for n in belief.scene.of_type(goal.object) if n in places and places[n] != filled]
        noticed = self.noticed
        here = [n for n in open_goals if n in noticed]
        elsewhere = [n for n in open_goals if n not in noticed]
        here += [n for n in noticed if kinds[n] not in (goal.object, goal.target)]
        words.append("here")
        words += [word_of(n) for n in here[:SHOWN_HERE]]
        words.append("seen")
        for name in elsewhere[:SHOWN_SEEN]:
            words += (word_of(name), word_of(places[name]))
        if word == "two":
            words += ("placed", word_of(filled) or "-")
        elif word == "light":
            words += ("with", word_of(self.lamp), word_of(places[self.lamp])) if self.lamp else ("with", "-", "-")
            words.append("on" if self.lamp in belief.toggled else "off")
        elif self.appliance:
            words += ("with", word_of(self.appliance))
        if goal.sliced:
            words += self._knife_words()
        if word != "light":
            words.append("to")
            # The nearest first: where one already lies, here, known to be open, never opened.
            order = sorted(self.targets, key=lambda r: (r != filled, r != facing, belief.is_shut(r)))
            words += [word_of(r) for r in order[:SHOWN_TARGETS]]
        words.append("new")
        words += [word_of(r) for r in self.candidates]
        words.append("ok" if last_ok else "nothing")
        return tuple(words)

    def _knife_words(self) -> tuple[str, ...]:
        """The knife, where it is, and whether everything that has to be sliced is."""
        place = "hold" if self.knife == self.belief.held else word_of(self.places.get(self.knife, ""))
        return ("cut", word_of(self.knife) or "-", place if self.knife else "-", "-" if self._must_cut() else "sliced")

    def _state_word(self, name: str) -> str:
        process = self.goal.process
        return STATE_WORDS[process] if process and name in self.belief.states[process] else "-"
