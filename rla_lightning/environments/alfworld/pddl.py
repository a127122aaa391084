"""The planning problem inside a tw-pddl file: read into facts and a goal, and written again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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
    sections = {section[0]: section[1:] for section in _parse(text)[1:] if isinstance(section, list) and section}
    for name in (":objects", ":init", ":goal"):
        if name not in sections:
            raise GameError(f"the problem has no {name}")
    facts = frozenset(tuple(str(word) for word in fact) for fact in sections[":init"] if _is_fact(fact))
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


def _is_fact(item: Expression) -> bool:
    """Costs and distances, (= ...), are no facts."""
    return isinstance(item, list) and bool(item) and item[0] != "=" and all(isinstance(word, str) for word in item)


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
    found = _conditions(expression)
    kinds = {fact[0]: fact for fact in found}
    typed = [fact[-1].removesuffix("type") for fact in found if fact[0] == "objecttype"]
    if not typed:
        raise GameError("the goal names no object type")
    if "istoggled" in kinds:
        lamp = next((fact[-1] for fact in found if fact[0] == "objecttype" and fact[1] == kinds["istoggled"][1]), "")
        held = next(
            (fact[-1] for fact in found if fact[0] == "objecttype" and fact[1] == kinds.get("holds", ("", "", ""))[2]), ""
        )
        goal = Goal("look_at_obj_in_light", held.removesuffix("type"), lamp.removesuffix("type"))
    else:
        target = kinds.get("receptacletype", ("", "", ""))[2].removesuffix("type")
        kind = next((name for name, (_, state) in PROCESSES.items() if state in kinds), "pick_and_place_simple")
        goal = Goal("pick_two_obj_and_place" if "not=" in kinds else kind, typed[0], target)
    goal = replace(goal, sliced="issliced" in kinds)
    if _canonical(found) != _canonical(_conditions(_parse(render_goal(goal))[1])):
        raise GameError("a goal of an unknown kind")
    return goal


def _conditions(expression: Expression) -> set[Fact]:
    """The conditions of nested and/exists; GameError for anything else."""
    if not isinstance(expression, list) or not expression:
        raise GameError("the goal is not an expression")
    head, *rest = expression
    if head == "and":
        return {condition for part in rest for condition in _conditions(part)}
    if head == "exists" and len(rest) == 2:
        return _conditions(rest[1])
    if head == "not" and len(rest) == 1 and isinstance(rest[0], list) and rest[0][0] == "=":
        return {("not=", *sorted(str(word) for word in rest[0][1:]))}
    if (
        isinstance(head, str)
        and head not in ("or", "not", "forall", "imply", "when")
        and all(isinstance(word, str) for word in rest)
    ):
        return {(head, *(str(word) for word in rest))}
    raise GameError(f"the goal uses {head!r}")


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


def facts_of(problem: Problem, predicate: str) -> Iterator[Fact]:
    """The facts with a predicate, in the order of their entities."""
    yield from sorted(fact for fact in problem.facts if fact[0] == predicate)
