"""What the agent knows from its observations, and the digest of it in vocabulary words."""

from __future__ import annotations

from collections.abc import Sequence

from rla_lightning.environments.household.affordances import (
    LAMP,
    MIDDLE,
    OPENABLE,
    PROCESS_APPLIANCE,
    PROCESS_STATE,
    TYPE,
    WORD,
    Goal,
)
from rla_lightning.environments.household.world import World

SHOWN_HERE = 3
SHOWN_SEEN = 2
SHOWN_TARGETS = 2
SHOWN_NEW = 5
SLOT_WORDS = ("hold", "at", "here", "seen", "placed", "with", "to", "new")
FILLER_WORDS = ("-", "nothing", "ok", "open", "closed", "on", "off")


class Knowledge:
    """A belief world that only observations fill, plus which receptacles have been looked into.

    Attributes:
        belief: a `World` that holds noticed objects and receptacles known to be open; what the agent
            itself did (heating, cleaning, ...) is shared with the real world.
        inspected: receptacles whose contents have been shown. When all have been and a needed object is
            still unknown (observation noise), the search starts over.
    """

    def __init__(self, goal: Goal, receptacles: Sequence[str], real: World) -> None:
        self.goal = goal
        self.receptacles = tuple(receptacles)
        self.targets = tuple(r for r in receptacles if TYPE[r] == goal.target)
        appliance = PROCESS_APPLIANCE.get(goal.word)
        self.appliance = next((r for r in receptacles if TYPE[r] == appliance), "")
        self.belief = World(real.at, real.held, {}, set(), real.clean, real.hot, real.cool, real.sliced, real.toggled)
        self.inspected: set[str] = set()

    def update(self, real: World, mentioned: Sequence[str] | None) -> None:
        """Take in one observation; `mentioned` is None when it says nothing about contents."""
        belief = self.belief
        if belief.held != real.held:
            if belief.held:
                belief.places[belief.held] = real.at
            else:
                belief.places.pop(real.held, None)
            belief.held = real.held
        at = belief.at = real.at
        if at == MIDDLE:
            return
        if at in real.opened:
            belief.opened.add(at)
        elif at in OPENABLE:
            belief.opened.discard(at)
        if mentioned is not None and not real.is_shut(at):
            for name in mentioned:
                belief.places[name] = at
            self.inspected.add(at)
            if self.is_searching and len(self.inspected) == len(self.receptacles):
                self.inspected = {at}

    @property
    def noticed(self) -> list[str]:
        """Objects that the agent knows to be in view."""
        belief = self.belief
        return [] if belief.at in OPENABLE and belief.at not in belief.opened else belief.contents(belief.at)

    @property
    def is_searching(self) -> bool:
        """Whether an object that the goal needs has not been seen yet."""
        belief, goal = self.belief, self.goal
        known = sum(TYPE[name] == goal.object for name in belief.places) + (TYPE.get(belief.held) == goal.object)
        return known < goal.count or (goal.word == "light" and LAMP not in belief.places)

    @property
    def candidates(self) -> list[str]:
        """Receptacles worth inspecting next, at most five, the one in front of the agent first; empty when not searching."""
        if not self.is_searching:
            return []
        at, inspected = self.belief.at, self.inspected
        new = [r for r in self.receptacles if r not in inspected]
        if at in new:
            new.remove(at)
            new.insert(0, at)
        return new[:SHOWN_NEW]

    def is_before_uninspected(self) -> bool:
        """Whether the agent stands before a closed receptacle that it has not looked into."""
        at = self.belief.at
        return at != MIDDLE and at not in self.inspected and self.belief.is_shut(at)

    def filled_target(self) -> str:
        """For "two": the target receptacle that already holds one of the objects, or ""."""
        belief, goal = self.belief, self.goal
        there = [p for n, p in belief.places.items() if TYPE[n] == goal.object and TYPE[p] == goal.target]
        return min(there, default="")

    def digest(self, last_ok: bool) -> tuple[str, ...]:
        """The knowledge as words: fixed slot order, each slot headed by its name."""
        belief, goal = self.belief, self.goal
        at, held, word = belief.at, belief.held, goal.word
        words = [word, goal.object, goal.target, "hold"]
        words += (WORD[held], self._state_word(held)) if held else ("nothing", "-")
        words += ("at", WORD[at], ("open" if at in belief.opened else "closed") if at in OPENABLE else "-")
        filled = self.filled_target() if word == "two" else ""
        open_goals = [n for n in sorted(belief.places) if TYPE[n] == goal.object and belief.places[n] != filled]
        noticed = self.noticed
        here = [n for n in open_goals if n in noticed]
        elsewhere = [n for n in open_goals if n not in noticed]
        here += [n for n in noticed if n != LAMP and TYPE[n] != goal.object]
        words.append("here")
        words += [WORD[n] for n in here[:SHOWN_HERE]]
        words.append("seen")
        for name in elsewhere[:SHOWN_SEEN]:
            words += (WORD[name], WORD[belief.places[name]])
        if word == "two":
            words += ("placed", WORD[filled] if filled else "-")
        elif word == "light":
            words += ("with", WORD[LAMP], WORD[belief.places[LAMP]]) if LAMP in belief.places else ("with", "-", "-")
            words.append("on" if LAMP in belief.toggled else "off")
        elif self.appliance:
            words += ("with", WORD[self.appliance])
        if word != "light":
            words.append("to")
            # The nearest first: where one already lies, here, known to be open, never opened.
            order = sorted(self.targets, key=lambda r: (r != filled, r != at, belief.is_shut(r)))
            words += [WORD[r] for r in order[:SHOWN_TARGETS]]
        words.append("new")
        words += [WORD[r] for r in self.candidates]
        words.append("ok" if last_ok else "nothing")
        return tuple(words)

    def _state_word(self, name: str) -> str:
        word = self.goal.word
        return PROCESS_STATE[word] if word in PROCESS_STATE and name in self.belief.state_set(word) else "-"
