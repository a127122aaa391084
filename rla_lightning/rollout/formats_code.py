"""Formats for models that write programs, and for reward models that judge programs by writing unit tests.

Answers are read line by line rather than by regular expressions: a policy that is rewarded for what it writes will write
anything, megabytes of back-ticks too, and no text may raise an error or take more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rla_lightning.rollout.formats import History, encode_words, end_id, gap_notes, state_words
from rla_lightning.rollout.formats_paper import render
from rla_lightning.rollout.templates import Message, encode_chat
from rla_lightning.types import ConfigError, ExpertAction, Observation, UnitTest

INPUT_END, OUTPUT_START = ":", "="  # words of a compact test: input : thought = output
NO_PROGRAM = "(no program could be read)"

EXAMPLE_PROBLEM = (
    "Read two integers and print the first minus the second.\n\nInput: two integers on one line, each between -1000 and 1000.\n"
    "Output: their difference."
)
EXAMPLE_PROGRAM = "a, b = map(int, input().split())\nprint(a - b)"
EXAMPLE_THOUGHT = "A careless program might take the larger minus the smaller. With 4 and 9 the answer is 4 - 9 = -5."
EXAMPLE_TEST = ("4 9", "-5")

PYTHON = frozenset({"python", "python3", "py", ""})  # what a program's block may be called
FENCES = ("```", "~~~")
INDENT_OF_CODE = 4  # a fence this much further right than the one that opened the block is part of the program
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # cannot be handed to a process as UTF-8 text
HEADING_MARKS = " \t*_#>`~-=:：.()0123456789"  # around the words of a heading, "**Test input:**" or "### 1. Input"
HEADING_WORDS = frozenset({"a", "the", "my", "unit", "test", "case", "example", "sample", "expected", "correct", "standard"})
HEADINGS = {"input": "input", "stdin": "input", "output": "output", "stdout": "output"}
SHOWN = 80  # characters of a bad value in an error message


class UnitTestFormat(Protocol):
    def prompt(self, tokenizer: PreTrainedTokenizerBase, observation: Observation) -> tuple[int, ...]:
        """The token ids that the reward model continues to write one unit test for the task of a first observation."""

    def parse(self, text: str) -> UnitTest | None:
        """The unit test, or None when the answer holds none."""

    def answer(self, tokenizer: PreTrainedTokenizerBase, test: UnitTest, thought: str = "") -> tuple[int, ...]:
        """A known test with the end token, for supervised warm starts."""


class CodePolicyFormat:
    """The answer is reasoning, then a whole program in a fenced Python block; of several blocks the last one counts.

    Args:
        system: system message; null leaves it to the chat template.
        max_characters: longer programs are not read.
        worked_example: show another problem with its program first, for models too small to follow instructions alone.
    """

    def __init__(self, system: str | None = None, max_characters: int = 50_000, worked_example: bool = False) -> None:
        self.system, self.max_characters = system, _check_max_characters(max_characters)
        self.worked_example = worked_example

    def prompt(self, tokenizer: PreTrainedTokenizerBase, history: History, observation: Observation) -> tuple[int, ...]:
        shown = None
        if self.worked_example:
            shown = (self._message((), Observation(EXAMPLE_PROBLEM)), fenced(EXAMPLE_PROGRAM, "python"))
        return _render(tokenizer, self._message(history, observation), self.system, shown)

    def _message(self, history: History, observation: Observation) -> str:
        observed = [*(turn.observation.text for turn in history), observation.text]
        parts = [
            "Write a complete Python 3 program that solves the problem below. It reads from standard input and writes to "
            "standard output, nothing besides what is asked for.",
            f"Problem:\n{observed[0]}",
        ]
        notes = [*gap_notes(history), ""]  # a note stands before what was observed after the turns that are left out
        for turn, note, after in zip(history, notes[1:], observed[1:], strict=True):
            written = fenced(turn.action, "python") if turn.action else NO_PROGRAM
            parts += [f"Your program of attempt {turn.number}:\n{written}", f"{note}What happened then:\n{after}"]
        if history:
            parts.append("Find out what was wrong, then write the whole program again.")
        parts.append(
            "You can reason first. End your answer with the program, all of it in one block:\n```python\n# your program\n```"
        )
        return "\n\n".join(parts)

    def parse(self, text: str, observation: Observation) -> str | None:
        del observation
        blocks = [block for block in _blocks(text) if block.language in PYTHON]
        programs = [block for block in blocks if block.language] or blocks  # without a name it may be a sample of the output
        closed = [block.body for block in programs if block.body is not None]
        return _usable(closed[-1], self.max_characters) if closed else None

    def answer(self, tokenizer: PreTrainedTokenizerBase, observation: Observation, expert: ExpertAction) -> tuple[int, ...]:
        program = _with_plain_newlines(expert.action).rstrip("\n")
        text = _after_thought(expert.thought.removeprefix("#"), fenced(program, "python"))
        if self.parse(text, observation) != program:
            raise ConfigError(f"the expert's program could not be read back from an answer: {_start(expert.action)}")
        return _encode_answer(tokenizer, text)


class CodeTestFormat:
    """The answer is reasoning, then one test: a fenced block headed Input and one headed Output.

    Args:
        system: system message; null leaves it to the chat template.
        max_characters: longer inputs or outputs are not read.
        worked_example: show another problem with its test first, for models too small to follow instructions alone.
    """

    def __init__(self, system: str | None = None, max_characters: int = 20_000, worked_example: bool = False) -> None:
        self.system, self.max_characters = system, _check_max_characters(max_characters)
        self.worked_example = worked_example

    def prompt(self, tokenizer: PreTrainedTokenizerBase, observation: Observation) -> tuple[int, ...]:
        shown = None
        if self.worked_example:
            answer = _after_thought(EXAMPLE_THOUGHT, _test_text(*EXAMPLE_TEST))
            shown = (self._message(Observation(EXAMPLE_PROBLEM)), answer)
        return _render(tokenizer, self._message(observation), self.system, shown)

    def _message(self, observation: Observation) -> str:
        form = _test_text("what the program reads", "what a correct program prints")
        parts = [
            "Write one unit test for programs that are meant to solve the problem below. A program reads from standard input "
            "and writes to standard output. The test should pass for every correct program and fail for as many wrong ones "
            "as possible.",
            f"Problem:\n{observation.text}",
            "First think: choose an input that the problem allows and that a careless program would get wrong, small enough "
            "to work out the output by hand, then work it out step by step. End your answer with exactly one test in this "
            f"form, values themselves rather than code that makes them:\n\n{form}",
        ]
        return "\n\n".join(parts)

    def parse(self, text: str) -> UnitTest | None:
        given: str | None = None
        printed: str | None = None
        for block in _blocks(text):
            heading = _heading(block.above)
            if heading == "input":
                given, printed = block.body, None  # an output belongs to the input before it
            elif heading == "output":
                printed = block.body
        if given is None or printed is None:
            return None
        stdout = _usable(printed, self.max_characters)
        if stdout is None or len(given) > self.max_characters or UNUSABLE.search(given):
            return None
        return UnitTest(_closed_line(given), stdout)

    def answer(self, tokenizer: PreTrainedTokenizerBase, test: UnitTest, thought: str = "") -> tuple[int, ...]:
        given, printed = (_with_plain_newlines(part).rstrip("\n") for part in (test.stdin, test.stdout))
        text = _after_thought(thought, _test_text(given, printed))
        if self.parse(text) != UnitTest(_closed_line(given), printed):
            raise ConfigError(f"the unit test could not be read back from an answer: {_start(repr(test))}")
        return _encode_answer(tokenizer, text)


class CompactTestFormat:
    """`<judge>` and the state; the answer is the input's words, `:`, a thought, `=` and the output's words."""

    def prompt(self, tokenizer: PreTrainedTokenizerBase, observation: Observation) -> tuple[int, ...]:
        return encode_words(tokenizer, ("<judge>", *state_words(observation)))

    def parse(self, text: str) -> UnitTest | None:
        words = text.split()
        if words.count(INPUT_END) != 1 or UNUSABLE.search(text):
            return None
        end = words.index(INPUT_END)
        given, rest = words[:end], words[end + 1 :]
        if not given or OUTPUT_START not in rest or rest[-1] == OUTPUT_START:
            return None
        start = len(rest) - rest[::-1].index(OUTPUT_START)
        return UnitTest(_closed_line(" ".join(given)), " ".join(rest[start:]))

    def answer(self, tokenizer: PreTrainedTokenizerBase, test: UnitTest, thought: str = "") -> tuple[int, ...]:
        words = (*test.stdin.split(), INPUT_END, *thought.split(), OUTPUT_START, *test.stdout.split())
        if self.parse(" ".join(words)) != UnitTest(_closed_line(test.stdin), test.stdout.rstrip("\n")):
            raise ConfigError(f"the unit test could not be read back from its words: {_start(repr(test))}")
        return (*encode_words(tokenizer, words), end_id(tokenizer))


def fenced(text: str, language: str = "") -> str:
    """A text as a fenced block, which is read back as it is."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


@dataclass(frozen=True)
class _Block:
    """A fenced block of an answer."""

    above: str  # the nearest line above that is not blank, since the block before
    language: str  # as it is called after the fence, in lower case
    body: str | None  # None when the text ends before the block


@dataclass(frozen=True)
class _Fence:
    """The line that opens a block."""

    indent: str
    mark: str  # one character
    length: int
    language: str

    def closes(self, line: str) -> bool:
        """Whether the line ends the block: a fence that is as long, nothing else, at about the same place."""
        stripped = line.strip()
        if len(stripped) < self.length or stripped[0] != self.mark or stripped.strip(self.mark):
            return False
        return _width(_indent(line)) < _width(self.indent) + INDENT_OF_CODE


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks after the thinking."""
    blocks: list[_Block] = []
    above = ""
    lines = iter(_with_plain_newlines(text.rpartition("</think>")[2]).split("\n"))
    for line in lines:
        fence = _fence(line)
        if fence is None:
            above = line.strip() or above
            continue
        blocks.append(_Block(above, fence.language, _body(lines, fence)))
        above = ""
    return blocks


def _fence(line: str) -> _Fence | None:
    """What a line opens, None when it is no fence."""
    indent = _indent(line)
    rest = line[len(indent) :]
    if not rest.startswith(FENCES):
        return None
    mark = rest[0]
    name = rest.lstrip(mark)
    if mark == "`" and mark in name:  # code within a line
        return None
    return _Fence(indent, mark, len(rest) - len(name), next(iter(name.split(maxsplit=1)), "").lower())


def _body(lines: Iterator[str], fence: _Fence) -> str | None:
    """The lines up to the end of the block, which are consumed; None when there is no end."""
    body: list[str] = []
    for line in lines:
        if fence.closes(line):
            break
        body.append(line)
    else:
        return None
    # Only where the whole block is indented: a program must not lose the indentation of some of its lines.
    if fence.indent and all(line.startswith(fence.indent) or not line.strip() for line in body):
        body = [line[len(fence.indent) :] for line in body]
    return "\n".join(body)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _width(indent: str) -> int:
    return len(indent.expandtabs(INDENT_OF_CODE))


def _heading(line: str) -> str | None:
    """Whether a line announces an input or an output: its word alone, or with others like "test" before it."""
    *before, last = line.strip(HEADING_MARKS).lower().split() or [""]
    return HEADINGS.get(last) if HEADING_WORDS.issuperset(before) else None


def _usable(body: str, max_characters: int) -> str | None:
    """The body, or None when it is blank, too long or no text for a process."""
    if not body.strip() or len(body) > max_characters or UNUSABLE.search(body):
        return None
    return body


def _closed_line(text: str) -> str:
    """The text with exactly one newline at its end, an empty text as it is."""
    lines = text.rstrip("\n")
    return f"{lines}\n" if lines else ""


def _with_plain_newlines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _test_text(given: str, printed: str) -> str:
    return f"**Input**\n{fenced(given)}\n\n**Output**\n{fenced(printed)}"


def _after_thought(thought: str, text: str) -> str:
    return f"{thought}\n\n{text}" if thought else text


def _render(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None, shown: tuple[str, str] | None) -> tuple[int, ...]:
    """A user's message after a system message of one's own and a worked example; all as plain text without a chat template."""
    if tokenizer.chat_template is None:
        example = f"{shown[0]}\n\nAnswer:\n{shown[1]}" if shown else ""
        return render(tokenizer, "\n\n".join(part for part in (system, example, text) if part))
    earlier: list[Message] = [("user", shown[0]), ("assistant", shown[1])] if shown else []
    return encode_chat(tokenizer, [*earlier, ("user", text)], system)


def _encode_answer(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return (*tokenizer(text, add_special_tokens=False).input_ids, end_id(tokenizer))


def _start(text: str) -> str:
    return f"{text[:SHOWN]}..." if len(text) > SHOWN else text


def _check_max_characters(number: int) -> int:
    if number < 1:
        raise ConfigError(f"max_characters must be at least 1, got {number}")
    return number
