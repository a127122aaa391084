"""Rewriting a problem with a language model: what it is asked, and how its answer is read.

An answer is read line by line; no text may raise an error or take more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from rla_lightning.environments.coding.problems import Problem
from rla_lightning.types import Direction, UnitTest

MIN_TESTS, MAX_TESTS = 4, 16
MAX_QUESTION = 8000  # characters
MAX_BLOCK = 20_000  # characters of a solution, an input or an output
MAX_HEADING = 80  # characters
MAX_SOLUTION_SHOWN = 4000  # characters; a longer one would only crowd the prompt
TEST_SHOWN = 60  # characters of each input and output of the current problem's tests
INDENT_OF_CODE = 4  # a fence this much further right than the one that opened the block is part of its text

QUESTION, SOLUTION, OTHER = "question", "solution", "other"  # sections
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # cannot be handed to a process as UTF-8 text
FENCE = re.compile(r"\s*+(`{3,}+)[^`]*")  # opens a block
TEST = re.compile(r"test (\d{1,3}) (input|output)")
FILLERS = frozenset({"the", "new", "case", "expected", "reference"})  # in headings: "### Test case 1: expected output"
RULES = frozenset({"", "---", "***", "___"})  # lines that only part a section from the next
WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w+|[-+*/%^<>=&|~×÷≤≥≠→−]")  # operators count where questions are compared: "a + b" is not "a - b"

COMPARED = {  # how outputs are, by the problem's checker; a checker of the user's own is not described
    "tokens": "Outputs are compared word by word, spacing does not matter.",
    "floats": "Outputs are compared word by word, numbers up to an error of 1e-6.",
    "unordered": "The words of an output may be printed in any order.",
    "lines": "Outputs are compared line by line, spaces at the end of a line do not matter.",
}
FORM = """### Question
the whole statement: what the input looks like, what to print, limits, one example

### Solution
```python
a complete program that reads standard input and prints the answer
```

### Test 1 input
```
what the program reads
```

### Test 1 output
```
what it prints
```

### Test 2 input
..."""


def rewrite_prompt(
    problem: Problem, root_question: str, direction: Direction, critique: str, successes: int, rollouts: int
) -> str:
    """Asks for a harder or easier problem in the spirit of the root problem, with a solution and tests.

    Args:
        problem: to be rewritten.
        root_question: of the problem that all rewrites descend from, so that they do not drift away from it.
        direction: where to.
        critique: pass rates of the hidden tests, may be "".
        successes: of the latest programs.
        rollouts: how many they were.
    """
    parts = [
        f"You write programming exercises. Write a new problem that is {direction} than the current one below. It must stay "
        "close in topic to the root problem, but it must not be the current problem in other words.",
        f"Root problem:\n{root_question}",
    ]
    is_root = problem.question == root_question
    parts.append("The current problem is the root problem itself." if is_root else f"Current problem:\n{problem.question}")
    if problem.solution is not None and len(problem.solution) <= MAX_SOLUTION_SHOWN:
        parts.append(f"A solution of the current problem:\n```python\n{problem.solution.rstrip()}\n```")
    if rollouts:
        parts.append(f"Of {rollouts} programs written for the current problem, {successes} passed all of its tests.")
    else:
        parts.append("No program has been written for the current problem yet.")
    if critique:
        parts += [_tests_shown(problem), critique]
    parts.append(
        f"Change the problem so that {'fewer' if direction == 'harder' else 'more'} programs would be right, yet not none and "
        f"not all. Programs read standard input and write standard output, within {problem.time_limit:g} seconds per test. "
        f"{COMPARED.get(problem.checker, '')}".rstrip()
    )
    parts.append(
        f"Give a correct solution and at least {MIN_TESTS} tests with different inputs, edge cases among them: values "
        "themselves, not code that makes them. The solution is run on every test, and a program that always prints the same "
        f"must fail one. Think briefly, then answer in exactly this form:\n\n{FORM}"
    )
    return "\n\n".join(parts)


def read_rewrite(parent: Problem, answer: str) -> Problem | str:
    """The rewritten problem, or what is wrong with the answer; difficulty and level are still the parent's."""
    try:
        sections = _sections(answer.rpartition("</think>")[2])
        return replace(
            parent,
            name=f"{parent.name}~",
            question=_question(sections, parent),
            solution=_solution(sections),
            tests=_tests(sections),
            wrong_solutions=(),
        )
    except _UnreadableError as reason:
        return str(reason)


def triviality(problem: Problem, check: Callable[[str, str, str], bool]) -> str | None:
    """A sentence when a program that always prints the same would pass all tests, else None.

    Args:
        problem: with tests.
        check: whether (stdin, expected, actual) pass.
    """
    for candidate in dict.fromkeys(test.stdout for test in problem.tests):
        if all(check(test.stdin, test.stdout, candidate) for test in problem.tests):
            return f"A program that always prints {candidate.strip()[:40]!r} passes all tests."
    return None


@lru_cache(maxsize=16384)
def shingles(question: str) -> frozenset[str]:
    """Its lower-case words and symbols, three at a time; one at a time where there are fewer."""
    words = TOKEN.findall(question.lower())
    if len(words) < 3:
        return frozenset(words)
    return frozenset(" ".join(words[i : i + 3]) for i in range(len(words) - 2))


def words_of(question: str) -> str:
    """Its words and symbols in lower case: equal for questions that differ in nothing else."""
    return " ".join(TOKEN.findall(question.lower()))


def near_duplicate(question: str, earlier: Iterable[str], threshold: float = 0.8, contained: bool = False) -> str | None:
    """The first earlier question that says nearly the same; None without one.

    Args:
        question: a new one.
        earlier: those that it must not repeat.
        threshold: least Jaccard similarity of the shingles.
        contained: a question also repeats one of which it holds that share, whatever it adds.
    """
    own = shingles(question)
    for other in earlier:
        theirs = shingles(other)
        both = len(own & theirs)
        whole = len(theirs) if contained else len(own) + len(theirs) - both
        if both >= threshold * whole and (whole or not own):  # two empty questions are equal
            return other
    return None


class _UnreadableError(ValueError):
    """An answer that is no rewrite; the message is a sentence that says why."""


@dataclass(frozen=True)
class _Piece:
    """A line outside all blocks, or a whole block."""

    text: str  # as it was written
    heading: str | None = None  # what section it begins
    block: str | None = None  # what stands between the fences


@dataclass(frozen=True)
class _Section:
    pieces: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)


def _pieces(text: str) -> Iterator[_Piece]:
    fence = ""
    indent = 0
    block: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        stripped = line.strip()
        if not fence:
            opening = FENCE.fullmatch(line)
            if opening is None:
                yield _Piece(line, heading=_heading(stripped))
            else:
                fence, indent, block = opening[1], _indent(line), [line]
        elif stripped.startswith(fence) and not stripped.strip("`") and _indent(line) < indent + INDENT_OF_CODE:
            yield _Piece("\n".join([*block, line]), block="\n".join(block[1:]))
            fence = ""
        else:  # "# Solution" may be a comment of the program, "### Solution" is taken for our heading
            inside = _heading(stripped) if stripped.startswith("###") else None
            if inside not in (None, OTHER):
                raise _UnreadableError(f"The code block above the heading {inside!r} is not closed.")
            block.append(line)
    if fence:
        raise _UnreadableError("The last code block is not closed.")


def _heading(stripped: str) -> str | None:
    """What section a line begins, OTHER for a heading of the model's own; None for any other line."""
    is_bold = stripped.startswith("**") and stripped.rstrip(": ").endswith("**")
    if len(stripped) > MAX_HEADING or not (is_bold or stripped.startswith("#")):
        return None
    words = " ".join(word for word in WORD.findall(stripped.lower()) if word not in FILLERS)
    test = TEST.fullmatch(words)
    if test is not None:
        return f"test {int(test[1])} {test[2]}"
    return words if words in (QUESTION, SOLUTION) else OTHER


def _sections(text: str) -> dict[str, _Section]:
    """The sections that were asked for, as far as they are there."""
    sections: dict[str, _Section] = {}
    name, section = OTHER, _Section()
    for piece in _pieces(text):
        if piece.heading is not None and not _is_inside(piece.heading, name, section):
            name, section = piece.heading, _Section()
            if name == QUESTION and name in sections:  # the answer begins again after a draft
                sections.clear()
            if name in sections:
                raise _UnreadableError(f"The answer has two sections {name!r}.")
            if name != OTHER:
                sections[name] = section
            continue
        section.pieces.append(piece.text)
        if piece.block is not None:
            section.blocks.append(piece.block)
    return sections


def _is_inside(heading: str, name: str, section: _Section) -> bool:
    """Whether a heading is part of a section: a statement has its own, a block may have one above it."""
    if name == QUESTION:
        return heading in (QUESTION, OTHER)
    return heading == OTHER and not section.blocks


def _question(sections: dict[str, _Section], parent: Problem) -> str:
    pieces = sections[QUESTION].pieces if QUESTION in sections else []
    while pieces and pieces[-1].strip() in RULES:
        pieces.pop()
    question = "\n".join(pieces).strip()
    if not question:
        raise _UnreadableError("The answer has no section 'question'.")
    if len(question) > MAX_QUESTION:
        raise _UnreadableError(f"The question has {len(question)} characters, more than {MAX_QUESTION}.")
    if UNUSABLE.search(question):
        raise _UnreadableError("The question holds characters that are no text.")
    if question.lower().split() == parent.question.lower().split():
        raise _UnreadableError("The question is that of the current problem.")
    return question


def _solution(sections: dict[str, _Section]) -> str:
    blocks = sections[SOLUTION].blocks if SOLUTION in sections else []
    if len(blocks) != 1:
        raise _UnreadableError(f"The section 'solution' must have one code block, it has {len(blocks)}.")
    (solution,) = blocks
    if not solution.strip():
        raise _UnreadableError("The solution is empty.")
    if len(solution) > MAX_BLOCK:
        raise _UnreadableError(f"The solution has {len(solution)} characters, more than {MAX_BLOCK}.")
    if UNUSABLE.search(solution):
        raise _UnreadableError("The solution holds characters that are no text.")
    return f"{solution}\n"


def _tests(sections: dict[str, _Section]) -> tuple[UnitTest, ...]:
    """The complete tests by their numbers, at most MAX_TESTS."""
    numbers = sorted({int(found[1]) for name in sections if (found := TEST.fullmatch(name))})
    tests: list[UnitTest] = []
    for number in numbers:
        stdin, stdout = (_value(sections.get(f"test {number} {half}")) for half in ("input", "output"))
        if stdin is not None and stdout is not None and stdout.strip():
            tests.append(UnitTest(f"{stdin}\n" if stdin else "", f"{stdout}\n"))
    tests = tests[:MAX_TESTS]
    if len(tests) < MIN_TESTS:
        raise _UnreadableError(f"The number of complete tests is {len(tests)}, less than {MIN_TESTS}.")
    if len({test.stdin.rstrip() for test in tests}) < len(tests):
        raise _UnreadableError("Two tests have the same input.")
    return tuple(tests)


def _value(section: _Section | None) -> str | None:
    """The only block of half a test, if a program can be given it."""
    if section is None or len(section.blocks) != 1:
        return None
    (block,) = section.blocks
    return None if len(block) > MAX_BLOCK or UNUSABLE.search(block) else block


def _tests_shown(problem: Problem) -> str:
    """The tests that the critique numbers, shortened."""
    lines = [
        f"{number}: {test.stdin[:TEST_SHOWN]!r} -> {test.stdout[:TEST_SHOWN]!r}"
        for number, test in enumerate(problem.tests[:MAX_TESTS], 1)
    ]
    return "\n".join(["Hidden tests of the current problem, input -> output, cut where long:", *lines])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
