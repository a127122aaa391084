"""Shortest ways to a goal: A* over the few decisions that matter, each with the walking and opening that it needs.

Every receptacle can be reached in one step, so a decision (take this, put it there, heat it, ...) costs 1 for walking
unless the agent is there already, 1 for opening where that is needed, and 1 for itself. Only the goal's objects, knives
where something has to be sliced, and what is in hand are ever moved. The tests compare it with exhaustive search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from rla_lightning.environments.alfred.scene import APPLIANCES, KNIVES, Ability, Action, Goal
from rla_lightning.environments.alfred.world import World

Until = Literal["won", "held", "delivered"]  # held: one of the goal's objects is in hand; delivered: one is at a target
HELD = ""


@dataclass(frozen=True, slots=True)
class _State:
    at: str  # location
    held: int  # index of an item, -1 for empty hands
    places: tuple[str, ...]  # of the items: a receptacle, or HELD
    moved: int  # bit set of the items that no longer lie where they started
    done: int  # bit set of the items that are clean, hot or cool as the goal wants it
    sliced: int  # bit set of items
    opened: frozenset[str]  # during the plan
    lit: bool  # a lamp of the goal's type has been switched


@dataclass(frozen=True, slots=True)
class _Decision:
    place: str  # where it is taken: a receptacle
    action: Action | None  # None: only to be there
    opens: bool  # whether the receptacle has to be open


class Search:
    """One search in one state of a world.

    Args:
        goal: to be reached.
        world: where the plan starts; not changed.
        until: won, or a part of the way.
    """

    def __init__(self, goal: Goal, world: World, until: Until = "won") -> None:
        self.goal, self.world, self.scene, self.until = goal, world, world.scene, until
        scene, places, word = world.scene, world.places, goal.word
        located = scene.location_of
        own = [
            n
            for n in scene.of_type(goal.object)
            if n == world.held or (places.get(n) in located and "pickup" in scene.objects[n].can)
        ]
        knives = [
            n
            for k in sorted(KNIVES)  # a set's order differs from process to process
            for n in scene.of_type(k)
            if n != world.held and places.get(n) in located and "pickup" in scene.objects[n].can
        ]
        cutting = goal.sliced and until == "won" and any(n not in world.sliced for n in own)
        items = dict.fromkeys([*own, *(knives if cutting else ()), *((world.held,) if world.held else ())])
        self.items = tuple(items)
        self.own = tuple(i for i, n in enumerate(self.items) if scene.objects[n].type == goal.object)
        self.knives = tuple(i for i, n in enumerate(self.items) if scene.objects[n].type in KNIVES)
        self.targets = () if word == "light" else tuple(r for r in scene.of_type(goal.target) if r in located)
        self.verb = goal.process or ""
        self.appliances = tuple(
            r for r, found in scene.receptacles.items() if self.verb and APPLIANCES.get(found.type) == self.verb
        )
        self.lamps = tuple(
            (n, places[n])
            for n in (scene.of_type(goal.target) if word == "light" else ())
            if places.get(n) in located and "toggle" in scene.objects[n].can
        )
        self.start = _State(
            world.at,
            self.items.index(world.held) if world.held else -1,
            tuple(HELD if n == world.held else places[n] for n in self.items),
            0,
            self._changed(goal.process) if goal.process else 0,
            self._changed("slice"),
            frozenset(),
            any(n in world.toggled for n, _ in self.lamps),
        )
        self.targets = self._different_targets()
        self.drops = self._useful_drops()

    def _changed(self, ability: Ability) -> int:
        """Bit set of the goal's objects on which it has been done already."""
        done = self.world.states[ability]
        return sum(1 << i for i in self.own if self.items[i] in done and ability in self.scene.objects[self.items[i]].can)

    def _different_targets(self) -> tuple[str, ...]:
        """Of empty targets each alone at a location where nothing else happens, the first open and the first closed one."""
        located = self.scene.location_of
        busy = {self.world.at, *(located[p] for p in self.start.places if p), *(located[r] for r in self.appliances)}
        chosen: list[str] = []
        known: set[bool] = set()
        for target in self.targets:
            if located[target] not in busy and len(self.scene.receptacles_at(located[target])) == 1:
                shut = self.world.is_shut(target)
                if shut in known:
                    continue
                known.add(shut)
            chosen.append(target)
        return tuple(chosen)

    def _useful_drops(self) -> tuple[str, ...]:
        """Every receptacle where something happens anyway, and an open and a closed one of the others per fitting."""
        located = self.scene.location_of
        busy = {
            self.world.at,
            *(located[p] for p in self.start.places if p),
            *(located[r] for r in (*self.targets, *self.appliances)),
        }
        busy |= {located[place] for _, place in self.lamps}
        chosen = [r for r in located if located[r] in busy]
        for name in self.items:
            for shut in (False, True):
                others = (
                    r for r in located if located[r] not in busy and self.world.is_shut(r) is shut and self.scene.accepts(r, name)
                )
                chosen += [r for r in (next(others, None),) if r is not None and r not in chosen]
        return tuple(chosen)

    # The search

    def run(self) -> list[_Decision] | None:
        """The decisions of a shortest plan; None when there is none."""
        order = count()
        best: dict[_State, int] = {self.start: 0}
        came: dict[_State, tuple[_State, _Decision]] = {}
        queue: list[tuple[int, int, int, _State]] = []
        first = self.least(self.start)
        if first is not None:
            heappush(queue, (first, next(order), 0, self.start))
        while queue:
            _, _, cost, state = heappop(queue)
            if cost > best[state]:
                continue
            if self.is_reached(state):
                return self._decisions(came, state)
            for decision, after in self.successors(state):
                total = cost + self.price(state, decision)
                if total < best.get(after, total + 1):
                    left = self.least(after)
                    if left is not None:
                        best[after], came[after] = total, (state, decision)
                        heappush(queue, (total + left, next(order), total, after))
        return None

    def _decisions(self, came: dict[_State, tuple[_State, _Decision]], state: _State) -> list[_Decision]:
        decisions = []
        while state in came:
            state, decision = came[state]
            decisions.append(decision)
        return decisions[::-1]

    def price(self, state: _State, decision: _Decision) -> int:
        walking = self.scene.location_of[decision.place] != state.at
        return walking + self._must_open(state, decision) + (decision.action is not None)

    def _must_open(self, state: _State, decision: _Decision) -> bool:
        return decision.opens and self.world.is_shut(decision.place) and decision.place not in state.opened

    def is_reached(self, state: _State) -> bool:
        if self.until == "held":
            return state.held in self.own
        if self.until == "delivered":
            return any(state.places[i] in self.targets for i in self.own)
        if self.goal.word == "light":
            ready = state.held in self.own and (not self.goal.sliced or state.sliced >> state.held & 1)
            return bool(ready) and any(
                self._is_lit(n, state) and self.scene.location_of[place] == state.at for n, place in self.lamps
            )
        ready_items = [state.places[i] for i in self.own if self._is_ready(i, state)]
        return any(ready_items.count(target) >= self.goal.count for target in self.targets)

    def _is_ready(self, i: int, state: _State) -> bool:
        return bool((not self.verb or state.done >> i & 1) and (not self.goal.sliced or state.sliced >> i & 1))

    def _is_lit(self, lamp: str, state: _State) -> bool:
        """One lamp is enough, so only the first that is switched counts."""
        return lamp in self.world.toggled or (state.lit and not any(n in self.world.toggled for n, _ in self.lamps))

    def successors(self, state: _State) -> Iterator[tuple[_Decision, _State]]:
        if state.held < 0:
            for i, place in enumerate(state.places):
                yield self._after(state, _Decision(place, ("take", self.items[i], place), opens=True), held=i, place=(i, HELD))
        else:
            yield from self._with_hands_full(state)
        if self.goal.word == "light" and self.until == "won":
            for lamp, place in self.lamps:
                if state.lit:
                    if self._is_lit(lamp, state):
                        yield self._after(state, _Decision(place, None, opens=False))
                else:
                    yield self._after(state, _Decision(place, ("use", lamp, ""), opens=False), lit=lamp)

    def _with_hands_full(self, state: _State) -> Iterator[tuple[_Decision, _State]]:
        i, name = state.held, self.items[state.held]
        for place in self.drops:
            if self.scene.accepts(place, name):
                yield self._after(state, _Decision(place, ("move", name, place), opens=True), held=-1, place=(i, place))
        if self.verb and i in self.own and not state.done >> i & 1 and self.verb in self.scene.objects[name].can:
            for place in self.appliances:
                yield self._after(state, _Decision(place, (self.verb, name, place), opens=False), done=i)
        if i in self.knives and self.goal.sliced:
            for j in self.own:
                if not state.sliced >> j & 1 and "slice" in self.scene.objects[self.items[j]].can:
                    for place in self._where_to_slice(j, state):
                        yield self._after(state, _Decision(place, ("slice", self.items[j], name), opens=False), sliced=j)

    def _where_to_slice(self, j: int, state: _State) -> list[str]:
        """A receptacle at each location at which the item can be sliced."""
        if state.moved >> j & 1:
            return [state.places[j]]
        locations = sorted(location for name, location in self.world.spots if name == self.items[j])
        return [here[0] for location in locations if (here := self.scene.receptacles_at(location))]

    def _after(
        self,
        state: _State,
        decision: _Decision,
        held: int | None = None,
        place: tuple[int, str] | None = None,
        done: int | None = None,
        sliced: int | None = None,
        lit: str = "",
    ) -> tuple[_Decision, _State]:
        places, moved = state.places, state.moved
        if place is not None:
            index, where = place
            places = (*places[:index], where, *places[index + 1 :])
            moved |= 1 << index
        return decision, _State(
            self.scene.location_of[decision.place],
            state.held if held is None else held,
            places,
            moved,
            state.done if done is None else state.done | 1 << done,
            state.sliced if sliced is None else state.sliced | 1 << sliced,
            state.opened | {decision.place} if self._must_open(state, decision) else state.opened,
            state.lit or bool(lit),
        )

    # The bound

    def least(self, state: _State) -> int | None:
        """No plan is shorter than this; None when there is none at all."""
        if self.is_reached(state):
            return 0
        if not self._is_possible(state):
            return None
        if self.until == "held":
            return 1
        if self.goal.word == "light":
            fetch = 0 if state.held in self.own else 1 + (state.held >= 0)
            return fetch + (not state.lit)
        if self.goal.word == "two" and self.until == "won":
            return self._least_for_two(state)
        return min(self._least_for(i, state) for i in self.own)

    def _is_possible(self, state: _State) -> bool:
        if self.until == "held" or not self.own:
            return bool(self.own)
        if self.goal.word == "light":
            return bool(self.lamps)
        if self.until == "won" and len(self.own) < self.goal.count:
            return False
        if self.goal.sliced and self.until == "won" and not self.knives and state.sliced.bit_count() < self.goal.count:
            return False
        done = not self.verb or bool(self.appliances) or any(state.done >> i & 1 for i in self.own)
        return done and bool(self.targets)

    def _least_for(self, i: int, state: _State) -> int:
        """Of bringing one item, ready, to a target."""
        located, here = self.scene.location_of, state.at
        total = 0
        process = bool(self.verb) and not state.done >> i & 1 and self.until == "won"
        slicing = self.goal.sliced and not state.sliced >> i & 1 and self.until == "won"
        if slicing:
            total += 1 + (state.held not in self.knives)
        if state.places[i] in self.targets and not process:
            return total
        if state.held != i:
            total += (state.held >= 0) + 1  # put down what is in hand, take
            total += located[state.places[i]] != here and not slicing
            here = located[state.places[i]]
        if process:
            rooms = {located[r] for r in self.appliances}
            total += 1 + (here not in rooms)
            here = next(iter(rooms)) if len(rooms) == 1 else here
        if len(self.targets) == 1 and (not process or len(self.appliances) == 1):
            total += located[self.targets[0]] != here
        return total + 1

    def _least_for_two(self, state: _State) -> int:
        lowest = 1000
        for target in self.targets:
            missing = max(0, 2 - sum(state.places[i] == target for i in self.own))
            acts = (
                2 * missing
                - (missing > 0 and state.held in self.own)
                + (state.held >= 0 and state.held not in self.own and missing > 0)
            )
            if self.goal.sliced:
                acts += max(0, 2 - state.sliced.bit_count())
            lowest = min(lowest, acts)
        return lowest
