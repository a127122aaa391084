"""Rewritten problems: what a language model is asked, and answers of every kind, good, spoilt and made to hurt."""

import json
import time
from dataclasses import replace
from random import Random

import pytest

from rla_lightning.environments.coding.checkers import equal_floats, equal_tokens
from rla_lightning.environments.coding.problems import Problem, problem_from, spec_of
from rla_lightning.environments.coding.rewriting import (
    near_duplicate,
    read_rewrite,
    rewrite_prompt,
    shingles,
    triviality,
    words_of,
)
from rla_lightning.types import UnitTest

PARENT = Problem(
    name="sum-of-two",
    question="Print the sum of two integers.",
    tests=(UnitTest("3 4\n", "7\n"), UnitTest("0 0\n", "0\n")),
    time_limit=1.5,
    checker="floats",
    difficulty=0.8,
    level="hard",
    solution="a, b = map(int, input().split())\nprint(a + b)\n",
    wrong_solutions=("print(7)",),
)
STATEMENT = "Print the sum of\nthree integers.\n\n```\n1 2 3\n```\ngives 6."
PROGRAM = "numbers = input().split()\n\n# Solution\nprint(sum(map(int, numbers)))"
TESTS = (("1 2 3", "6"), ("0 0 0", "0"), ("-1 0 1\n", "0\n"), ("9 9 9", "27"), ("", "0"))
GOOD = """### Question
Print the sum of
three integers.

```
1 2 3
```
gives 6.

### Solution
```python
numbers = input().split()

# Solution
print(sum(map(int, numbers)))
```

### Test 1 input
```
1 2 3
```

### Test 1 output
```
6
```

### Test 2 input
```
0 0 0
```

### Test 2 output
```
0
```

### Test 3 input
```
-1 0 1

```

### Test 3 output
```
0

```

### Test 4 input
```
9 9 9
```

### Test 4 output
```
27
```

### Test 5 input
```
```

### Test 5 output
```
0
```
"""
READ = Problem(
    name="sum-of-two~",
    question=STATEMENT,
    tests=(
        UnitTest("1 2 3\n", "6\n"),
        UnitTest("0 0 0\n", "0\n"),
        UnitTest("-1 0 1\n\n", "0\n\n"),
        UnitTest("9 9 9\n", "27\n"),
        UnitTest("", "0\n"),
    ),
    time_limit=1.5,
    checker="floats",
    difficulty=0.8,
    level="hard",
    solution="numbers = input().split()\n\n# Solution\nprint(sum(map(int, numbers)))\n",
    wrong_solutions=(),
)
MEGABYTE = 1_000_000


def answer_of(question: str, program: str, *tests: tuple[str, str]) -> str:
    parts = [f"### Question\n{question}", f"### Solution\n```python\n{program}\n```"]
    for number, (stdin, stdout) in enumerate(tests, 1):
        parts += [f"### Test {number} input\n```\n{stdin}\n```", f"### Test {number} output\n```\n{stdout}\n```"]
    return "\n\n".join(parts)


def sections_of(answer: str) -> list[str]:
    return [f"### {part}" for part in answer.split("### ")[1:]]


def check_result(result: Problem | str) -> bool:
    """What holds for every answer, and whether it is a problem."""
    if isinstance(result, str):
        assert result.endswith(".")
        assert len(result) < 200
        return False
    assert 4 <= len(result.tests) <= 16
    assert len({test.stdin for test in result.tests}) == len(result.tests)
    assert all(test.stdout.strip() for test in result.tests)
    assert result.solution is not None
    assert result.solution.strip()
    assert result.question != PARENT.question
    assert 0 < len(result.question.strip()) <= 8000
    assert (result.name, result.checker, result.time_limit, result.wrong_solutions) == ("sum-of-two~", "floats", 1.5, ())
    assert problem_from(json.loads(json.dumps(spec_of(result)))) == result
    return True


# The question to the rewriter


def test_a_prompt_names_all_that_is_known() -> None:
    problem = replace(PARENT, question="Print the sum of three integers.")
    prompt = rewrite_prompt(problem, PARENT.question, "harder", "Pass rates: 1: 100%; 2: 25%.", 7, 8)
    for part in (
        "a new problem that is harder than the current one",
        "Root problem:\nPrint the sum of two integers.\n",
        "Current problem:\nPrint the sum of three integers.\n",
        "```python\na, b = map(int, input().split())\nprint(a + b)\n```\n",
        "Of 8 programs written for the current problem, 7 passed all of its tests.",
        "1: '3 4\\n' -> '7\\n'\n2: '0 0\\n' -> '0\\n'\n\nPass rates: 1: 100%; 2: 25%.",
        "fewer programs would be right",
        "within 1.5 seconds per test. Outputs are compared word by word, numbers up to an error of 1e-6.\n",
        "at least 4 tests",
    ):
        assert part in prompt
    assert prompt.endswith("### Test 2 input\n...")


def test_a_prompt_names_nothing_that_is_not_known() -> None:
    problem = replace(PARENT, solution=None, checker="of-the-user")
    prompt = rewrite_prompt(problem, PARENT.question, "easier", "", 0, 0)
    assert "that is easier than" in prompt
    assert "more programs would be right" in prompt
    assert prompt.count(PARENT.question) == 1
    assert "The current problem is the root problem itself." in prompt
    assert "No program has been written for the current problem yet." in prompt
    assert "within 1.5 seconds per test.\n" in prompt
    for absent in ("A solution of", "Hidden tests", "print(7)", "compared"):
        assert absent not in prompt


def test_a_prompt_stays_short() -> None:
    tests = tuple(UnitTest("1" * 50_000, "2" * 50_000) for _ in range(40))
    problem = replace(PARENT, tests=tests, solution="#" * 50_000)
    assert len(rewrite_prompt(problem, PARENT.question, "easier", "Pass rates.", 0, 8)) < 5000


def test_the_form_that_is_asked_for_can_be_read() -> None:
    form = rewrite_prompt(PARENT, PARENT.question, "easier", "", 0, 8).rpartition("exactly this form:\n\n")[2]
    assert read_rewrite(PARENT, form) == "The number of complete tests is 1, less than 4."


# Answers that can be used


def test_a_good_answer() -> None:
    assert read_rewrite(PARENT, GOOD) == READ


def test_answers_are_written_in_many_ways() -> None:
    thinking = f"<think>### Question\nWrong.\n```\n{GOOD}</think>\n{GOOD}"
    windows = GOOD.replace("\n", "\r\n")
    draft = "### Question\nA draft.\n### Solution\n```\nprint()\n```\n### Test 9 input\n```\n7\n```\n"
    bold = GOOD.replace("### Question", "**Question:**").replace("### Test 1 input", "**Test 1 input**:")
    case = GOOD.replace("### Test 1 input", "## TEST CASE 01: Input").replace("### Test 2 output", "# Test 2 (expected output)")
    labelled = GOOD.replace("### Test 2 input\n", "### Test 2 input\n**All are zero**\n\nLike this:\n")
    explained = GOOD.replace("### Test 3 input", "### Explanation\n```\n0 + 0\n```\nas said.\n\n### Test 3 input")
    ruled = GOOD.replace("gives 6.\n", "gives 6.\n\n---\n")
    longer = GOOD.replace("```python\n", "````python\n").replace("numbers)))\n```", "numbers)))\n````")
    ended = GOOD + "\n### Notes\nI hope that it helps:\n```\n1\n```"
    first = "\n".join([*sections_of(GOOD)[2:], *sections_of(GOOD)[:2]])
    for answer in (thinking, windows, draft + GOOD, bold, case, labelled, explained, ruled, longer, ended, first, GOOD.strip()):
        assert read_rewrite(PARENT, answer) == READ


def test_a_statement_keeps_headings_of_its_own() -> None:
    question = "**Sums**\n\n## Input\nTwo integers.\n\n**Question**: which?\n\n**Output:**\nOne.\n\n# Notes\n\nNone."
    result = read_rewrite(PARENT, answer_of(question, PROGRAM, *TESTS))
    assert isinstance(result, Problem)
    assert result.question == question


def test_a_program_keeps_what_looks_like_the_form() -> None:
    program = 'TEXT = """\n    ```\n    # Test 1 input\n    ```\n"""\n# Solution\n## Question\n### own heading\nprint("```")'
    result = read_rewrite(PARENT, answer_of("Print three ticks.", program, *TESTS))
    assert isinstance(result, Problem)
    assert result.solution == f"{program}\n"


def test_incomplete_tests_are_left_out() -> None:
    answer = answer_of(STATEMENT, PROGRAM, *TESTS, ("5", " "), ("7\0", "7"), ("8", "8\ud800"), ("9" * 20_001, "9"))
    answer += "\n\n### Test 20 input\n```\n2\n```\n\n### Test 21 output\n```\n2\n```"
    answer += "\n\n### Test 22 input\n\n### Test 22 output\n2\n"
    assert read_rewrite(PARENT, answer) == READ


def test_the_first_sixteen_tests_are_kept() -> None:
    tests = [(f"{number} 1 1", f"{number + 2}") for number in range(1, 21)]
    result = read_rewrite(PARENT, answer_of(STATEMENT, PROGRAM, *tests, tests[17]))
    assert isinstance(result, Problem)
    assert len(result.tests) == 16
    assert result.tests[0] == UnitTest("1 1 1\n", "3\n")
    assert result.tests[15] == UnitTest("16 1 1\n", "18\n")


# Answers that cannot be used


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "The answer has no section 'question'."),
        ("I cannot do that.", "The answer has no section 'question'."),
        (f"{GOOD}</think>", "The answer has no section 'question'."),
        (f"{GOOD}</think>I am done.", "The answer has no section 'question'."),
        (GOOD.replace("### Question", "Question"), "The answer has no section 'question'."),
        (answer_of(" \n---\n ", PROGRAM, *TESTS), "The answer has no section 'question'."),
        (answer_of("a" * 8001, PROGRAM, *TESTS), "The question has 8001 characters, more than 8000."),
        (answer_of("A\0B", PROGRAM, *TESTS), "The question holds characters that are no text."),
        (answer_of("A\ud800B", PROGRAM, *TESTS), "The question holds characters that are no text."),
        (answer_of(PARENT.question, PROGRAM, *TESTS), "The question is that of the current problem."),
        (
            answer_of("PRINT the sum\n of two  integers.", PROGRAM, *TESTS),
            "The question is that of the current problem.",
        ),
        (GOOD.replace("### Solution", "### Program"), "The section 'solution' must have one code block, it has 0."),
        (GOOD.replace("```python\n", "```python\n1\n```\n```\n"), "The section 'solution' must have one code block, it has 2."),
        (answer_of(STATEMENT, " \n ", *TESTS), "The solution is empty."),
        (answer_of(STATEMENT, "#" * 20_001, *TESTS), "The solution has 20001 characters, more than 20000."),
        (answer_of(STATEMENT, "print('\0')", *TESTS), "The solution holds characters that are no text."),
        (answer_of(STATEMENT, PROGRAM), "The number of complete tests is 0, less than 4."),
        (answer_of(STATEMENT, PROGRAM, *TESTS[:3]), "The number of complete tests is 3, less than 4."),
        (answer_of(STATEMENT, PROGRAM, *TESTS[:3], ("5 5 5", "")), "The number of complete tests is 3, less than 4."),
        (GOOD.replace("Test 1", "Test 1000").replace("Test 5", "Test 5.5"), "The number of complete tests is 3, less than 4."),
        (answer_of(STATEMENT, PROGRAM, *TESTS, ("9 9 9 ", "27")), "Two tests have the same input."),
        (GOOD.replace("### Test 2 input", "### Test 1 input"), "The answer has two sections 'test 1 input'."),
        (GOOD + "### Solution\n```\nprint(0)\n```", "The answer has two sections 'solution'."),
        (GOOD.removesuffix("```\n"), "The last code block is not closed."),
        (GOOD + "```", "The last code block is not closed."),
        (GOOD.replace("numbers)))\n```", "numbers)))"), "The code block above the heading 'test 1 input' is not closed."),
        (GOOD.replace("```\ngives", "gives"), "The code block above the heading 'solution' is not closed."),
        (f"```markdown\n{GOOD}```", "The code block above the heading 'question' is not closed."),
    ],
)  # fmt: skip
def test_an_unusable_answer_is_told_why(answer: str, reason: str) -> None:
    assert read_rewrite(PARENT, answer) == reason


# Answers that are meant to hurt


STRANGE = ("", "```", "~~~", "`" * 7, "### Question", "### Test ٣ input", "**", "#", "</think>", "\ud800", "\0")


def spoilt(answer: str, rng: Random) -> str:
    """The answer with some lines or characters dropped, doubled, swapped, moved, or replaced by something else."""
    lines = answer.split("\n")
    for _ in range(rng.randint(1, 6)):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                lines[i] = lines[j]
            case 1:
                lines[i], lines[j] = lines[j], lines[i]
            case 2:
                lines.insert(i, lines[j])
            case 3 if len(lines) > 1:
                del lines[i]
            case 4:
                lines[i] = rng.choice(STRANGE)
            case 5:
                lines[i] = lines[i][: rng.randint(0, len(lines[i]))] + rng.choice("`#* \t\r\f\x1c\u2028\udfff0é")
            case _:
                lines[i] = " " * rng.randint(0, 6) + lines[i]
    return "\n".join(lines)


def test_spoilt_answers_are_problems_or_refused() -> None:
    rng = Random(1)
    read = [check_result(read_rewrite(PARENT, spoilt(GOOD, rng))) for _ in range(6000)]
    assert 600 < sum(read) < 5400  # both happen often


def test_cut_answers_are_problems_or_refused() -> None:
    """The fourth test is complete where it is followed by another heading or by the end."""
    read = [length for length in range(len(GOOD) + 1) if check_result(read_rewrite(PARENT, GOOD[:length]))]
    fourth = GOOD.index("27\n```") + len("27\n```")
    assert read[0] == fourth
    assert all(length >= fourth for length in read)
    assert len(GOOD) in read
    assert not any(check_result(read_rewrite(PARENT, GOOD[start:])) for start in range(len("### Question"), len(GOOD)))


def test_sections_in_any_order() -> None:
    rng = Random(2)
    for _ in range(1000):
        sections = sections_of(GOOD)
        rng.shuffle(sections)
        assert read_rewrite(PARENT, "".join(sections)) == READ
        check_result(read_rewrite(PARENT, "".join(sections[: rng.randint(0, len(sections))])))


def test_noise_is_refused() -> None:
    rng = Random(3)
    for _ in range(1000):
        noise = rng.randbytes(rng.randint(0, 300))
        assert not check_result(read_rewrite(PARENT, noise.decode("latin-1")))
        assert not check_result(read_rewrite(PARENT, noise.decode("utf-8", "surrogateescape")))


@pytest.mark.parametrize(
    "unit",
    [
        "a", " ", "\n", "`", "```\n", "````\n", "#", "# ", "*", "**\n", " ```", "```\n```\n", "\n" + "`" * 50, "\r", "</think>",
        "### Question\n", "### Test 1 input\n", "### Solution\n```\n", "#" + " " * 70 + "x\n", "### a" + " " * 60 + ":\n",
        "### Test 1" + "1" * 60 + " input\n", "**" + "a " * 30 + "**\n", "é ", "٣", "\0", "\x1c",
    ],
)  # fmt: skip
def test_a_megabyte_is_read_at_once(unit: str) -> None:
    text = unit * (MEGABYTE // len(unit))
    short = text[:100_000]
    start = time.process_time()
    for answer in (GOOD + text, short[:-1], short + GOOD, answer_of(short, PROGRAM, *TESTS), answer_of(STATEMENT, short, *TESTS)):
        check_result(read_rewrite(PARENT, answer))
    assert time.process_time() - start < 20  # seconds of CPU, whatever else runs; what is quadratic takes hours


# Trivial and repeated problems


def test_a_constant_program_must_fail_one_test() -> None:
    same = replace(PARENT, tests=(UnitTest("1", "Yes\n"), UnitTest("2", " Yes"), UnitTest("3", "Yes")))
    assert triviality(same, equal_tokens) == "A program that always prints 'Yes' passes all tests."
    assert triviality(replace(PARENT, tests=(*same.tests, UnitTest("4", "No"))), equal_tokens) is None
    assert triviality(replace(PARENT, tests=(*same.tests, UnitTest("4", "yes"))), equal_tokens) is None


def test_what_is_constant_is_for_the_checker_to_say() -> None:
    close = replace(PARENT, tests=(UnitTest("1", "0.5"), UnitTest("2", "0.50000001")))
    assert triviality(close, equal_tokens) is None
    assert triviality(close, equal_floats) == "A program that always prints '0.5' passes all tests."
    judged: list[tuple[str, str, str]] = []

    def accepts_even(stdin: str, expected: str, actual: str) -> bool:
        judged.append((stdin, expected, actual))
        return int(actual) % 2 == 0

    anything = replace(PARENT, tests=(UnitTest("a", "1"), UnitTest("b", "2")))
    assert triviality(anything, accepts_even) == "A program that always prints '2' passes all tests."
    assert judged == [("a", "1", "1"), ("a", "1", "2"), ("b", "2", "2")]


def test_shingles_are_three_words() -> None:
    assert shingles("Print the sum: of two!") == {"print the sum", "the sum of", "sum of two"}
    assert shingles("(PRINT) the,sum of\ttwo") == {"print the sum", "the sum of", "sum of two"}
    assert shingles("n n n n n") == {"n n n"}
    assert shingles("Two words.") == {"two", "words"}
    assert shingles("...") == frozenset()


def test_near_duplicates_share_most_shingles() -> None:
    question = "a b c d e f"  # abc bcd cde def
    assert near_duplicate(question, []) is None
    assert near_duplicate(question, ["A, b, c: d e f?"]) == "A, b, c: d e f?"
    assert near_duplicate(question, ["x y z", "a b c d e f g", "a b c d e f"]) == "a b c d e f g"  # 4 of 5 are common
    assert near_duplicate(question, ["a b c d e f g h"]) is None  # 4 of 6
    assert near_duplicate(question, ["a b c d e f g h"], threshold=0.66) == "a b c d e f g h"
    assert near_duplicate(question, ["f e d c b a"]) is None
    assert near_duplicate("a b", ["b a"]) == "b a"
    assert near_duplicate("", ["a"]) is None
    assert near_duplicate("?", ["!"]) == "!"


def test_near_duplicates_may_hold_an_earlier_question_and_more() -> None:
    longer = "a b c d e f g h"  # abc bcd cde def efg fgh
    assert near_duplicate(longer, ["a b c d e f"]) is None  # 4 of 6
    assert near_duplicate(longer, ["a b c d e f"], contained=True) == "a b c d e f"  # 4 of its 4
    assert near_duplicate(longer, ["a b c d e f x"], contained=True) == "a b c d e f x"  # 4 of its 5
    assert near_duplicate(longer, ["a b c d e x"], contained=True) is None  # 3 of its 4
    assert near_duplicate("a b c d e f", [longer], contained=True) is None  # a part of an earlier one is new: 4 of its 6
    assert near_duplicate(longer, ["x y z", "c d e", "a b c"], contained=True) == "c d e"


def test_questions_that_differ_in_an_operator_are_different() -> None:
    questions = [f"Read a and b. Print a {sign} b." for sign in ("+", "-", "*", "<=", "≤")]
    assert len({words_of(question) for question in questions}) == 5
    assert near_duplicate(questions[0], questions[1:]) is None
    assert words_of("Print a+b") == words_of("print A + b.")


def test_a_question_without_words_repeats_none() -> None:
    assert near_duplicate("a b c d", ["?", "(...)"], contained=True) is None


def test_words_of_a_question() -> None:
    assert words_of("Print  the SUM,\nof `n` numbers (n <= 10)!") == "print the sum of n numbers n < = 10"
    assert words_of("print the sum of n numbers: n 10") == "print the sum of n numbers n 10"
    assert words_of("?!") == ""
