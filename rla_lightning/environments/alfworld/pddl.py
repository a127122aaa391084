"""The planning problem inside a tw-pddl file: read into facts and a goal, and written again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count

from rla_lightning.environments.alfred.scene import Goal

Fact = tuple[str, ...]  # predicate and arguments, all lower case
Expression = str | list["Expression"]

CONSTANTS = {  # types that the domain's own rules name: they have to be declared in every problem
    "sinkbasintype": "rtype",
    "microwavetype": "rtype",
    "fridgetype": "rtype",
    "knifetype": "otype",
    "butterknifetype": "otype",
}
PROCESSES = {  # kind of goal -> (what the object must be able to, what must have been done)
    "pick_clean_then_place_in_recep": ("cleanable", "isclean"),
    "pick_heat_then_place_in_recep": ("heatable", "ishot"),
    "pick_cool_then_place_in_recep": ("coolable", "iscool"),
}
ARITIES: Mapping[str, int] = {  # arguments of the predicates that the simulator reads
    **dict.fromkeys(("openable", "opened", "isreceptacleobject", "pickupable", "toggleable", "istoggled"), 1),
    **dict.fromkeys(("sliceable", "issliced", "cleanable", "isclean", "heatable", "ishot", "coolable", "iscool"), 1),
    **dict.fromkeys(("atlocation", "receptacleatlocation", "objectatlocation", "inreceptacle", "inreceptacleobject"), 2),
    **dict.fromkeys(("receptacletype", "objecttype", "cancontain", "holds"), 2),
}
_TOKEN = re.compile(r";[^\n]*|[()]|[^\s()]+")


class GameError(ValueError):
    """A game that cannot be used; the message is a short reason."""


@dataclass(frozen=True)
class Problem:
    """What a problem says; everything is lower case.

    Attributes:
        objects: entity -> its PDDL type: agent, location, receptacle, object, rtype or otype.
        facts: the initial state without costs and distances.
        goal: with types named without their ending "type".
    """

    objects: Mapping[str, str]
    facts: frozenset[Fact]
    goal: Goal


def parse_problem(text: str) -> Problem:
    """Read a PDDL problem of AlfWorld; GameError says what is wrong with it."""
    sections = {section[0]: section[1:] for section in _parse(text) if isinstance(section, list) and _starts_with_word(section)}
    for name in (":objects", ":init", ":goal"):
        if name not in sections:
            raise GameError(f"the problem has no {name}")
    if len(sections[":goal"]) != 1:
        raise GameError("the problem's goal is not one expression")
    facts = frozenset(_facts(sections[":init"]))
    return Problem(_typed(sections[":objects"]), facts, _goal(sections[":goal"][0]))


def _parse(text: str) -> list[Expression]:
    stack: list[list[Expression]] = [[]]
    for token in _TOKEN.findall(text.lower()):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise GameError("the problem has a bracket too many")
            done = stack.pop()
            stack[-1].append(done)
        elif token[0] != ";":
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1 or not isinstance(stack[0][0], list):
        raise GameError("the problem's brackets do not match")
    return stack[0][0]


def _starts_with_word(expression: list[Expression]) -> bool:
    return bool(expression) and isinstance(expression[0], str)


def _facts(items: list[Expression]) -> Iterator[Fact]:
    """The initial state's facts; costs and distances, (= ...), are none."""
    for item in items:
        if not isinstance(item, list) or not _starts_with_word(item):
            raise GameError("the problem's initial state is not a list of facts")
        if item[0] != "=":
            yield _atom(item)


def _atom(expression: list[Expression]) -> Fact:
    words = tuple(word for word in expression if isinstance(word, str))
    predicate, arguments = words[0], len(words) - 1
    if len(words) != len(expression) or ARITIES.get(predicate, arguments) != arguments:
        raise GameError(f"{predicate!r} does not have the arguments that it should have")
    return words


def _typed(words: list[Expression]) -> dict[str, str]:
    """Of `a b - location c - object`: the type of each name."""
    typed: dict[str, str] = {}
    waiting: list[str] = []
    following = iter(words)
    for word in following:
        if not isinstance(word, str):
            raise GameError("the problem's objects are not a list of names")
        if word == "-":
            kind = str(next(following, ""))
            typed |= dict.fromkeys(waiting, kind)
            waiting = []
        else:
            waiting.append(word)
    if waiting:
        raise GameError(f"the problem's object {waiting[0]!r} has no type")
    return typed


def _goal(expression: Expression) -> Goal:
    """Recognise one of ALFRED's goals: the one whose meaning is exactly the expression's."""
    found = _meaning(expression)
    said = {fact[0]: fact for fact in found}
    types = {fact[1]: fact[2].removesuffix("type") for fact in found if fact[0] == "objecttype"}
    if not types:
        raise GameError("the goal names no type of object")
    if "istoggled" in said:
        goal = Goal("look_at_obj_in_light", types.get(said.get("holds", ("",))[-1], ""), types.get(said["istoggled"][1], ""))
    else:
        target = said.get("receptacletype", ("",))[-1].removesuffix("type")
        kind = next((name for name, (_, state) in PROCESSES.items() if state in said), "pick_and_place_simple")
        goal = Goal("pick_two_obj_and_place" if "not=" in said else kind, min(types.values()), target)
    goal = replace(goal, sliced="issliced" in said)
    if _canonical(found) != _canonical(_meaning(_parse(render_goal(goal))[1])):
        raise GameError("a goal of an unknown kind")
    return goal


def _meaning(expression: Expression) -> set[Fact]:
    """The conditions without the types of variables that nothing else is said of."""
    found = set(_conditions(expression, {}, count(1)))
    used = {word for fact in found if fact[0] != "type" for word in fact}
    return {fact for fact in found if fact[0] != "type" or fact[1] in used}


def _conditions(expression: Expression, names: Mapping[str, str], numbers: Iterator[int]) -> Iterator[Fact]:
    """The conditions of nested and/exists, each variable with a name and a type of its own; GameError for anything else."""
    if not isinstance(expression, list) or not expression or not isinstance(expression[0], str):
        raise GameError("the goal is not an expression")
    head, *rest = expression
    if head == "and":
        for part in rest:
            yield from _conditions(part, names, numbers)
    elif head == "exists" and len(rest) == 2 and isinstance(rest[0], list):
        typed = _typed(rest[0])
        inner = {**names, **{variable: f"?{next(numbers)}" for variable in typed}}
        yield from (("type", inner[variable], kind) for variable, kind in typed.items())
        yield from _conditions(rest[1], inner, numbers)
    elif head == "not" and len(rest) == 1 and isinstance(rest[0], list) and rest[0][:1] == ["="]:
        yield ("not=", *sorted(_bound(_atom(rest[0]), names)[1:]))
    elif head in ARITIES:
        yield _bound(_atom(expression), names)
    else:
        raise GameError(f"the goal uses {head!r}")


def _bound(fact: Fact, names: Mapping[str, str]) -> Fact:
    for word in fact:
        if word.startswith("?") and word not in names:
            raise GameError(f"the goal's {word} is not bound")
    return tuple(names.get(word, word) for word in fact)


def _canonical(conditions: set[Fact]) -> frozenset[Fact]:
    """The conditions with variables named by what is said of them, so that their names do not matter."""
    said = {
        variable: sorted(_role(fact, variable) for fact in conditions if variable in fact) for variable in _variables(conditions)
    }
    for _ in range(2):  # then by what is said of the variables that they occur with
        said = {
            v: sorted(_role(f, v) + "".join(str(said[w]) for w in f if w in said and w != v) for f in conditions if v in f)
            for v in said
        }
    renamed = {variable: str(roles) for variable, roles in said.items()}
    return frozenset(
        tuple(sorted(renamed.get(w, w) for w in f)) if f[0] == "not=" else tuple(renamed.get(w, w) for w in f) for f in conditions
    )


def _variables(conditions: set[Fact]) -> set[str]:
    return {word for fact in conditions for word in fact if word.startswith("?")}


def _role(fact: Fact, variable: str) -> str:
    return " ".join("*" if word == variable else "?" if word.startswith("?") else word for word in fact)


def render_goal(goal: Goal) -> str:
    """The goal as PDDL, (:goal ...)."""
    sliced = "(sliceable {0}) (issliced {0}) "
    if goal.word == "light":
        cut = sliced.format("?o") if goal.sliced else ""
        return (
            "(:goal (and "
            "(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and "
            f"(objecttype ?ot {goal.target}type) (toggleable ?ot) (istoggled ?ot) "
            "(receptacleatlocation ?r ?l) (atlocation ?a ?l) (inreceptacle ?ot ?r))) "
            f"(exists (?o - object ?a - agent) (and {cut}(objecttype ?o {goal.object}type) (holds ?a ?o)))))"
        )
    names = ("?o1", "?o2") if goal.word == "two" else ("?o",)
    parts = []
    for name in names:
        able, state = PROCESSES.get(goal.kind, ("", ""))
        process = f"({able} {name}) ({state} {name}) " if able else ""
        cut = sliced.format(name) if goal.sliced else ""
        parts.append(
            f"{cut}{process}(objecttype {name} {goal.object}type) (receptacletype ?r {goal.target}type) (inreceptacle {name} ?r)"
        )
    if goal.word == "two":
        parts.append("(not (= ?o1 ?o2))")
    variables = " ".join(f"{name} - object" for name in names)
    return f"(:goal (exists (?r - receptacle {variables}) (and {' '.join(parts)})))"


def render_problem(problem: Problem) -> str:
    """A whole problem that the engine accepts; `parse_problem` reads it back."""
    objects = {**CONSTANTS, **problem.objects}
    lines = ["(define (problem game)", "(:domain alfred)", "(:objects"]
    lines += [f"{name} - {kind}" for name, kind in sorted(objects.items())]
    lines += [")", "(:init", "(= (total-cost) 0)"]
    lines += [f"({' '.join(fact)})" for fact in sorted(problem.facts)]
    lines += [")", render_goal(problem.goal), "(:metric minimize (total-cost)))"]
    return "\n".join(lines)
