"""A family of small programs: read numbers, keep some, change them, reduce them to one number.

    print ( sum ( x * x for x in map(int,input().split()) if x % 2 == 0 ) )

A `Pipeline` is such a program as data; from it follow its Python text, what it prints, how a problem asks for it, and the
mistakes that are one edit away. Programs have a space between all words, so that a word-level tokenizer can spell them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

READ = "map(int,input().split())"
DIGITS = range(10)  # that inputs are made of
DROPPED = "-"  # in a thought: the number before it is not kept


@dataclass(frozen=True)
class Operation:
    """One thing that is done to numbers, with a constant where it needs one."""

    code: str  # in terms of x (and k)
    apply: Callable[[int, int], int]  # x, k
    phrases: tuple[str, ...]  # ways to say it; equal meanings
    constants: range = range(1)  # values of k; one value: it needs none


FILTERS = {
    "even": Operation("x % 2 == 0", lambda x, k: x % 2 == 0, ("even", "divisible by two")),
    "odd": Operation("x % 2 == 1", lambda x, k: x % 2 == 1, ("odd", "not even")),
    "third": Operation("x % 3 == 0", lambda x, k: x % 3 == 0, ("multiples of three", "divisible by three")),
    "above": Operation("x > k", lambda x, k: x > k, ("above k", "greater than k", "more than k"), range(2, 7)),
    "least": Operation("x >= k", lambda x, k: x >= k, ("at least k", "not below k"), range(3, 8)),
    "below": Operation("x < k", lambda x, k: x < k, ("below k", "smaller than k", "less than k"), range(3, 8)),
    "most": Operation("x <= k", lambda x, k: x <= k, ("at most k", "not above k"), range(2, 7)),
}
MAPS = {
    "square": Operation("x * x", lambda x, k: x * x, ("squared", "times itself")),
    "double": Operation("x * 2", lambda x, k: x * 2, ("doubled", "times two")),
    "triple": Operation("x * 3", lambda x, k: x * 3, ("tripled", "times three")),
    "plus": Operation("x + k", lambda x, k: x + k, ("plus k", "increased by k"), range(1, 6)),
    "gap": Operation("10 - x", lambda x, k: 10 - x, ("taken from ten", "missing to ten")),
}
REDUCTIONS: dict[str, tuple[str, Callable[[Sequence[int]], int], tuple[str, ...]]] = {
    "sum": ("sum ( E )", sum, ("the sum", "the total")),
    "max": ("max ( ( E ) , default = 0 )", lambda xs: max(xs, default=0), ("the largest", "the maximum")),
    "min": ("min ( ( E ) , default = 0 )", lambda xs: min(xs, default=0), ("the smallest", "the minimum")),
    "count": ("len ( [ E ] )", len, ("the number", "how many")),
    "distinct": ("len ( { E } )", lambda xs: len(set(xs)), ("the number of different values", "how many different values")),
}
CONFUSED = {  # what is taken for what
    "even": ("odd", "third"), "odd": ("even",), "third": ("even",),
    "above": ("least", "below"), "least": ("above", "most"), "below": ("most", "above"), "most": ("below", "least"),
    "square": ("double",), "double": ("square", "triple"), "triple": ("double",), "plus": ("gap",), "gap": ("plus",),
    "sum": ("max", "count"), "max": ("min", "sum"), "min": ("max",), "count": ("distinct", "sum"), "distinct": ("count",),
}  # fmt: skip

SAME = {"least": "above", "most": "below"}  # "at least 4" is "above 3"

Used = tuple[str, int]  # an operation's name and its constant


@dataclass(frozen=True)
class Pipeline:
    """Which operations, in order; numbers have to pass all filters."""

    filters: tuple[Used, ...]
    maps: tuple[Used, ...]
    reduction: str

    @property
    def size(self) -> int:
        return len(self.filters) + len(self.maps)

    @property
    def is_sound(self) -> bool:
        """Whether operations matter and numbers stay small enough for a word each."""
        values = self.changed(DIGITS)
        return (
            min(values) >= 0
            and max(values) <= LARGEST // 2
            and len({name for name, _ in self.filters}) == len(self.filters)
            and not (self.reduction == "count" and self.maps)
        )

    @property
    def shape(self) -> tuple[str, ...]:
        """The operations in any order and without their constants, those that can do the same under one name."""
        filters = sorted(SAME.get(name, name) for name, _ in self.filters)
        return (*filters, *sorted(name for name, _ in self.maps), self.reduction)

    def program(self) -> str:
        value = "x"
        for name, k in self.maps:
            value = _with_constant(MAPS[name].code, k).replace("x", value if value == "x" else f"( {value} )")
        tests = " and ".join(_with_constant(FILTERS[name].code, k) for name, k in self.filters)
        each = f"{value} for x in {READ}" + (f" if {tests}" if tests else "")
        return f"print ( {REDUCTIONS[self.reduction][0].replace('E', each)} )"

    def kept(self, numbers: Sequence[int]) -> list[int]:
        return [x for x in numbers if all(FILTERS[name].apply(x, k) for name, k in self.filters)]

    def changed(self, numbers: Sequence[int]) -> list[int]:
        for name, k in self.maps:
            numbers = [MAPS[name].apply(x, k) for x in numbers]
        return list(numbers)

    @cached_property
    def values(self) -> tuple[int | None, ...]:
        """What each digit is changed to; None where it is not kept."""
        return tuple(self.changed([x])[0] if self.kept([x]) else None for x in DIGITS)

    def answer(self, numbers: Sequence[int]) -> int:
        """What the program prints for a line of digits."""
        return REDUCTIONS[self.reduction][1]([value for x in numbers if (value := self.values[x]) is not None])

    def stages(self, x: int) -> list[int]:
        """A number of the input and what becomes of it, map by map; the number alone where a filter drops it."""
        if not self.kept([x]):
            return [x]
        values = [x]
        for name, k in self.maps:
            values.append(MAPS[name].apply(values[-1], k))
        return values

    def thought(self, numbers: Sequence[int]) -> str:
        """How the answer comes about, number by number: "3 9 11 4 -" squares and adds 2, and drops the 4."""
        return " ".join(" ".join(map(str, self.stages(x))) if self.kept([x]) else f"{x} {DROPPED}" for x in numbers)

    def phrase(self, style: int) -> str:
        """The problem's core in words; equal pipelines are described in many ways."""
        order, style = style % 2, style // 2
        what = _choose(REDUCTIONS[self.reduction][2], style)
        which = " and ".join(_said(FILTERS, used, style + 1) for used in self.filters)
        change = " then ".join(_said(MAPS, used, style + 2) for used in self.maps)
        which = f"those that are {which}" if which else "all"
        change = f" each {change}" if change else ""
        return f"{what} of {which}{change}" if order == 0 else f"take {which}{change} and give {what}"

    def mistakes(self) -> Iterator[Pipeline]:
        """Programs that somebody might write instead."""
        for field, operations in (("filters", FILTERS), ("maps", MAPS)):
            used = getattr(self, field)
            for index, (name, k) in enumerate(used):
                for other in self._instead(operations, name, k):
                    yield replace(self, **{field: (*used[:index], *other, *used[index + 1 :])})  # type: ignore[arg-type]
        if len(self.maps) == 2:
            yield replace(self, maps=self.maps[::-1])
        for other_reduction in CONFUSED[self.reduction]:
            yield replace(self, reduction=other_reduction)

    @staticmethod
    def _instead(operations: dict[str, Operation], name: str, k: int) -> Iterator[tuple[Used, ...]]:
        yield ()  # forgotten
        constants = operations[name].constants
        if len(constants) > 1:
            yield from (((name, near),) for near in (k - 1, k + 1) if near in constants)
        for other in CONFUSED[name]:
            yield ((other, k if k in operations[other].constants else operations[other].constants[0]),)


LARGEST = 500  # the largest number with a word of its own


def vocabulary() -> tuple[str, ...]:
    """Every word of programs, phrases and unit tests."""
    names = chain(FILTERS.items(), MAPS.items())
    words = {word for _, operation in names for phrase in (*operation.phrases, operation.code) for word in phrase.split()}
    words |= {word for code, _, phrases in REDUCTIONS.values() for text in (code, *phrases) for word in text.split()}
    words |= {
        *"()[]{}:=,",
        DROPPED,
        "print",
        "for",
        "x",
        "in",
        "if",
        "default",
        "of",
        "and",
        "all",
        "each",
        "then",
        "take",
        "give",
    }
    words |= {"those", "that", "are"}
    words |= {READ, *map(str, range(LARGEST + 1))}
    return tuple(sorted(words - {"k", "E"}))


def _with_constant(code: str, k: int) -> str:
    return " ".join(str(k) if word == "k" else word for word in code.split())


def _choose(phrases: tuple[str, ...], style: int) -> str:
    return phrases[style % len(phrases)]


def _said(operations: dict[str, Operation], used: Used, style: int) -> str:
    name, k = used
    return _with_constant(_choose(operations[name].phrases, style), k)
