"""Programs and unit tests in answers: every rule by hand, then texts that a model under pressure might write."""

import time
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from rla_lightning.rollout.formats import Turn
from rla_lightning.rollout.formats_code import (
    INPUT_END,
    NO_PROGRAM,
    OUTPUT_START,
    CodePolicyFormat,
    CodeTestFormat,
    CompactTestFormat,
    fenced,
)
from rla_lightning.types import ConfigError, ExpertAction, Observation, UnitTest

START, END = "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system role first') }}{% endif %}" + CHAT
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
OPENS_THOUGHT = CHAT.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

SUM = Observation("Print the sum of two integers.")
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
TEST = UnitTest("2 3\n", "5")
GOOD_TEST = "**Input**\n```\n2 3\n```\n\n**Output**\n```\n5\n```"


def byte_tokenizer(template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """Bytes as tokens: any text survives a round trip."""
    symbols = [START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, additional_special_tokens=[START])
    fast.chat_template = template
    return fast


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "</s>", "<judge>", ":", "=", "add", "two", "2", "3", "5", "sum", "#carry"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", additional_special_tokens=["<judge>"]
    )


def read(text: str, max_characters: int = 50_000) -> str | None:
    return CodePolicyFormat(max_characters=max_characters).parse(text, SUM)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Add them.\n```python\nprint(1)\n```", "print(1)"),
        ("```python\nprint(1)\n```\nThis prints 1.", "print(1)"),
        ("```python3\nprint(1)\n```", "print(1)"),
        ("```Py\nprint(1)\n```", "print(1)"),
        ("``` python title=main.py\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("```python\n\nif 1:\n    print(1)\n\n```", "\nif 1:\n    print(1)\n"),
        ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')"),  # a longer fence holds shorter ones
        ("```python\nprint(1)\n`````", "print(1)"),
        ("~~~python\nprint(1)\n~~~", "print(1)"),
        ("~~~python\nprint('''\n```\n''')\n~~~", "print('''\n```\n''')"),
        ("```python\nprint(1)\n```  \t", "print(1)"),
        ("```python\r\na = 1\r\nprint(a)\r\n```\r\n", "a = 1\nprint(a)"),
    ],
)
def test_a_program_in_a_block(text, program):
    assert read(text) == program


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print(1)",
        "```python print(1)```",  # code within a line
        "Here: ```python\nprint(1)",
        "```cpp\nint main() {}\n```",
        "```java\nclass A {}\n```",
        "```python2\nprint 1\n```",
        "```python\n```",
        "```python\n \n\t\n```",
        "```python\nprint(1)",
        "```python\nprint(1)\n``",
        "```python\nprint(1)```",
        "```python\nprint(1)\n``` end",
        "```python\nprint(1)\n~~~",
        "````python\nprint(1)\n```",
        "```python\nprint('\0')\n```",
        "```python\nprint('\ud83d')\n```",
    ],
)
def test_no_program(text):
    assert read(text) is None


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\n1\n```\nBetter:\n```python\n2\n```", "2"),
        ("```python\n1\n```\n```cpp\n2\n```", "1"),
        ("```python\n1\n```\n```\n2\n```", "1"),  # a block without a name may be a sample of the output
        ("```\n1\n```\n```\n2\n```", "2"),  # or the program, where there is no other one
        ("```\n1\n```\n```cpp\n2\n```", "1"),
        ("```\n1\n```\n```python\n2", None),  # the program broke off
        ("```\n1\n```\n```\n2", "1"),
        ("```cpp\n1\n```\n```cpp\n2\n```", None),
        ("```python\n1\n```\nWait:\n```python\n2", "1"),  # what broke off does not count
        ("```python\n1\n```\n```python\n```", None),  # an empty block does
        ("```python\n1\n```\n```python\n\0\n```", None),
        ("<think>```python\n1\n```</think>\n```python\n2\n```", "2"),
        ("<think>\n```python\n1\n```\n</think>\nHm.", None),
        ("<think>a</think>\n```python\n1\n```\n</think>\nno", None),
        ("<think>\n```python\n1\n</think>\n```python\n2\n```", "2"),  # a block of the thinking that was never closed
    ],
)
def test_the_last_closed_python_block_counts(text, program):
    assert read(text) == program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("1. So:\n   ```python\n   if 1:\n       print(1)\n\n   print(2)\n   ```", "if 1:\n    print(1)\n\nprint(2)"),
        ("\t```python\n\tprint(1)\n\t```", "print(1)"),
        ("  ```python\n\tx = 1\n  ```", "\tx = 1"),  # other indentation than the fence's is left as it is
        ("  ```python\nif 1:\n    print(1)\n```", "if 1:\n    print(1)"),
        ("  ```python\n  a = '''\nb'''\n  ```", "  a = '''\nb'''"),
        ("```python\nprint('''\n    ```\n''')\n```", "print('''\n    ```\n''')"),  # too far right to close the block
        ("```python\nprint('''\n\t```\n''')\n```", "print('''\n\t```\n''')"),
        ("```python\nprint(1)\n   ```", "print(1)"),
        ("```python\nprint('''\n```\n''')\n```", "print('''"),  # the first line that is only a fence ends the block
        ("```python\nprint('''\n```text\n''')\n```", "print('''\n```text\n''')"),
        ("    ```python\n    print('''\n        ```\n''')\n    ```", "    print('''\n        ```\n''')"),
    ],
)
def test_indentation_and_fences_within_programs(text, program):
    assert read(text) == program


def test_long_programs_are_not_read():
    assert read("```python\n12345\n```", max_characters=5) == "12345"
    assert read("```python\n123456\n```", max_characters=5) is None
    assert read("```\n" + "x" * 50_001 + "\n```") is None
    with pytest.raises(ConfigError, match="max_characters must be at least 1, got 0"):
        CodePolicyFormat(max_characters=0)
    with pytest.raises(ConfigError, match="max_characters must be at least 1, got -3"):
        CodeTestFormat(max_characters=-3)


def test_fenced():
    assert fenced("1", "python") == "```python\n1\n```"
    assert fenced("a\n```\nb") == "````\na\n```\nb\n````"
    assert fenced("") == "```\n\n```"


@pytest.mark.parametrize("template", [None, CHAT, NEEDS_SYSTEM, NO_SYSTEM, OPENS_THOUGHT])
def test_the_first_prompt(template):
    tokenizer = byte_tokenizer(template)
    shown = tokenizer.decode(CodePolicyFormat().prompt(tokenizer, [], SUM))
    assert "reads from standard input and writes to standard output" in shown
    assert "\n\nProblem:\nPrint the sum of two integers.\n\nYou can reason first." in shown
    assert "```python\n# your program\n```" in shown
    assert "attempt" not in shown
    endings = {None: "Answer:\n", OPENS_THOUGHT: f"{END}\n{START}assistant\n<think>\n"}
    assert shown.endswith(endings.get(template, f"{END}\n{START}assistant\n"))
    assert (f"{START}system" in shown) == (template == NEEDS_SYSTEM)


def test_system_messages():
    tokenizer, plain = byte_tokenizer(), byte_tokenizer(None)
    for format_ in (CodePolicyFormat("Be brief."), CodeTestFormat("Be brief.")):
        prompts = [
            format_.prompt(t, [], SUM) if isinstance(format_, CodePolicyFormat) else format_.prompt(t, SUM)
            for t in (tokenizer, plain)
        ]
        assert tokenizer.decode(prompts[0]).startswith(f"{START}system\nBe brief.{END}\n{START}user\nWrite ")
        assert plain.decode(prompts[1]).startswith("Be brief.\n\nWrite ")
    with pytest.raises(ConfigError, match=r"refuses the system message 'Be brief\.'"):
        CodeTestFormat("Be brief.").prompt(byte_tokenizer(NO_SYSTEM), SUM)


def test_a_later_attempt_shows_the_earlier_ones():
    tokenizer = byte_tokenizer()
    history = [Turn(1, SUM, "print(7)"), Turn(2, Observation("Printed 7, not 5."), ""), Turn(5, Observation("Crashed."), PROGRAM)]
    shown = tokenizer.decode(CodePolicyFormat().prompt(tokenizer, history, Observation("Too slow.")))
    assert (
        "Problem:\nPrint the sum of two integers.\n\n"
        "Your program of attempt 1:\n```python\nprint(7)\n```\n\n"
        "What happened then:\nPrinted 7, not 5.\n\n"
        f"Your program of attempt 2:\n{NO_PROGRAM}\n\n"
        "(turns 3 to 4 are left out)\nWhat happened then:\nCrashed.\n\n"
        f"Your program of attempt 5:\n```python\n{PROGRAM}\n```\n\n"
        "What happened then:\nToo slow.\n\n"
        "Find out what was wrong"
    ) in shown
    assert shown.count("Print the sum") == 1


@pytest.mark.parametrize("template", [None, CHAT])
@pytest.mark.parametrize(
    ("action", "program"),
    [
        (PROGRAM, PROGRAM),
        (PROGRAM.replace("\n", "\r\n") + "\n", PROGRAM),
        ("print('''\n```\n''')", "print('''\n```\n''')"),
        ("print('é λ 🙂')", "print('é λ 🙂')"),
    ],
)
@pytest.mark.parametrize("thought", ["", "#add", "Read both.\n```text\n1 2\n```"])
def test_a_program_survives_tokens(template, action, program, thought):
    tokenizer, policy = byte_tokenizer(template), CodePolicyFormat()
    ids = policy.answer(tokenizer, SUM, ExpertAction(action, thought))
    assert ids[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert policy.parse(text, SUM) == program
    assert text.startswith({"": "```", "#add": "add\n\n```"}.get(thought, "Read both.\n"))


@pytest.mark.parametrize(
    ("action", "thought"),
    [("", ""), ("\n", ""), ("\0", ""), ("x" * 50_001, ""), ("print(1)", "```"), ("print('</think>')\n", "")],
)
def test_programs_that_no_answer_can_hold(action, thought):
    with pytest.raises(ConfigError, match=r"the expert's program could not be read back from an answer: (?s:.{0,90})\Z"):
        CodePolicyFormat().answer(byte_tokenizer(), SUM, ExpertAction(action, thought))


@pytest.mark.parametrize(
    ("text", "test"),
    [
        (GOOD_TEST, TEST),
        (f"I think.\n\n{GOOD_TEST}\nDone.", TEST),
        ("### Input\n```\n2 3\n```\n### Output\n```\n5\n```", TEST),
        ("**Test Input:**\n```text\n2 3\n```\n**Test Output:**\n```text\n5\n```", TEST),
        ("test input:\n\n~~~\n2 3\n~~~\n\nEXPECTED OUTPUT :\n~~~\n5\n~~~", TEST),
        ("1. **Input**:\n   ```\n   2 3\n   ```\n2. __Output__\n   ```\n   5\n   ```", TEST),
        ("**Input**\r\n```\r\n2 3\r\n```\r\n**Output**\r\n```\r\n5\r\n```\r\n", TEST),
        ("Input：\n```\n2 3\n```\nOutput：\n```\n5\n```", TEST),
        ("stdin\n```\n2 3\n```\nstdout\n```\n5\n```", TEST),
        ("**Input**\n```\n2 3\n\n\n```\n**Output**\n```\n5\n```", TEST),  # one newline at the end of the input
        ("**Input**\n```\n```\n**Output**\n```\n5\n```", UnitTest("", "5")),
        ("**Input**\n```\n\n\n```\n**Output**\n```\n5\n```", UnitTest("", "5")),
        ("**Input**\n```\n2\n 3\n```\n**Output**\n```\n5 \n\n6\n```", UnitTest("2\n 3\n", "5 \n\n6")),
        ("**Input**\n````\n```\n````\n**Output**\n```\n5\n```", UnitTest("```\n", "5")),
        (GOOD_TEST.replace("5", "9") + "\nNo:\n" + GOOD_TEST, TEST),
        (GOOD_TEST + "\n**Output**\n```\n6\n```", UnitTest("2 3\n", "6")),
        ("**Input**\n```\n9\n```\n" + GOOD_TEST, TEST),
        ("**Input**\n```\n2 3\n```\nCheck:\n```python\nprint(2 + 3)\n```\n**Output**\n```\n5\n```", TEST),
        ("<think>" + GOOD_TEST.replace("5", "9") + "</think>" + GOOD_TEST, TEST),
        ("An input of two numbers.\n```\n9\n```\nThe output format\n```\n9\n```\n" + GOOD_TEST, TEST),
    ],
)
def test_a_unit_test_in_an_answer(text, test):
    assert CodeTestFormat().parse(text) == test


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2 3 -> 5",
        "**Input**\n2 3\n**Output**\n5",
        "**Input**\n```\n2 3\n```",
        "**Output**\n```\n5\n```",
        "**Output**\n```\n5\n```\n**Input**\n```\n2 3\n```",
        GOOD_TEST + "\n**Input**\n```\n4 4\n```",  # the last input has no output
        GOOD_TEST + "\n**Input**\n```\n4 4",
        GOOD_TEST + "\n**Output**\n```\n5",
        "**Input**\n```\n2 3\n```\n**Output**\n```\n5",
        "**Input**\n```\n2 3\n**Output**\n```\n5",
        "**Input**\n```\n2 3\n```\n**Output**\n```\n```",
        "**Input**\n```\n2 3\n```\n**Output**\n```\n \n\t\n```",
        "**Input**\n```\n2 \0\n```\n**Output**\n```\n5\n```",
        "**Input**\n```\n2 3\n```\n**Output**\n```\n\udc00\n```",
        "**Input**\n```\n\ud800\n```\n**Output**\n```\n5\n```",
        "```\n2 3\n```\n```\n5\n```",
        "**Input**\nis\n```\n2 3\n```\n**Output**\n```\n5\n```",
        f"<think>{GOOD_TEST}</think>",
        f"{GOOD_TEST}</think>\n**Output**\n```\n5\n```",
    ],
)
def test_no_unit_test(text):
    assert CodeTestFormat().parse(text) is None


def test_long_unit_tests_are_not_read():
    format_ = CodeTestFormat(max_characters=3)
    assert format_.parse(GOOD_TEST) == TEST
    assert format_.parse(GOOD_TEST.replace("2 3", "2 33")) is None
    assert format_.parse(GOOD_TEST.replace("5", "5555")) is None
    assert CodeTestFormat().parse(GOOD_TEST.replace("5", "5" * 20_001)) is None


@pytest.mark.parametrize("template", [None, CHAT, NEEDS_SYSTEM, NO_SYSTEM, OPENS_THOUGHT])
def test_the_prompt_for_a_unit_test(template):
    tokenizer = byte_tokenizer(template)
    shown = tokenizer.decode(CodeTestFormat().prompt(tokenizer, SUM))
    assert "Problem:\nPrint the sum of two integers.\n\n" in shown
    assert "exactly one test" in shown
    assert "**Input**\n```\nwhat the program reads\n```\n\n**Output**\n```\nwhat a correct program prints\n```" in shown
    assert shown.endswith("Answer:\n") == (template is None)


@pytest.mark.parametrize("thought", ["", "2 + 3 = 5", "Not so:\n" + GOOD_TEST])
@pytest.mark.parametrize(
    ("test", "parsed"),
    [
        (TEST, TEST),
        (UnitTest("2 3", "5\n"), TEST),
        (UnitTest("2\r\n3\r\n", "5\r\n6\r\n"), UnitTest("2\n3\n", "5\n6")),
        (UnitTest("", "5"), UnitTest("", "5")),
        (UnitTest("```\n", "```\n~~~\né 🙂"), UnitTest("```\n", "```\n~~~\né 🙂")),
    ],
)
def test_a_unit_test_survives_tokens(test, parsed, thought):
    tokenizer, format_ = byte_tokenizer(), CodeTestFormat()
    ids = format_.answer(tokenizer, test, thought)
    assert ids[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.startswith(thought or "**Input**\n")
    assert format_.parse(text) == parsed


@pytest.mark.parametrize(
    ("test", "thought"), [(UnitTest("1", " \n"), ""), (UnitTest("\0", "1"), ""), (UnitTest("1", "2"), "```"), (TEST, "~~~\n")]
)
def test_unit_tests_that_no_answer_can_hold(test, thought):
    with pytest.raises(ConfigError, match=r"the unit test could not be read back from an answer: UnitTest\("):
        CodeTestFormat().answer(byte_tokenizer(), test, thought)


def test_compact_prompt_and_answer():
    tokenizer, format_ = word_tokenizer(), CompactTestFormat()
    assert format_.prompt(tokenizer, Observation("Add two numbers.", digest=("add", "two"))) == (2, 5, 6)
    assert format_.prompt(tokenizer, Observation("add two numbers")) == (2, 5, 6, 0)
    ids = format_.answer(tokenizer, TEST, "#carry sum = 5")
    assert ids == (7, 8, 3, 11, 10, 4, 9, 4, 9, 1)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "2 3 : #carry sum = 5 = 5"
    assert format_.parse(text) == TEST
    assert format_.answer(tokenizer, UnitTest("2 3", "5\n")) == (7, 8, 3, 4, 9, 1)
    assert (INPUT_END, OUTPUT_START) == (":", "=")


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("2 3 : = 5", TEST),
        (" 2  3 : sum\n=  5 ", TEST),
        ("2 = 3 : = 5 5", UnitTest("2 = 3\n", "5 5")),
        ("2 3 : a = b = 5", TEST),
        ("", None),
        ("2 3", None),
        ("2 3 = 5", None),
        ("2 3 : 5", None),
        ("2 = 3 : 5", None),
        (": = 5", None),
        ("2 3 : =", None),
        ("2 3 : a = 5 =", None),
        ("2 : 3 : = 5", None),
        ("2 3 : = 5 : 6", None),
        ("2 3: = 5", None),
        ("2 \0 : = 5", None),
        ("2 3 : = \ud800", None),
    ],
)
def test_compact_parse(text, test):
    assert CompactTestFormat().parse(text) == test


@pytest.mark.parametrize(
    ("test", "thought"),
    [
        (UnitTest("", "5"), ""),
        (UnitTest("2", ""), ""),
        (UnitTest("2 : 3", "5"), ""),
        (UnitTest("2", "5"), "a : b"),
        (UnitTest("2\n3", "5"), ""),  # words do not say where a line ends
        (UnitTest("2", "5\n6"), ""),
        (UnitTest("2", "= 5"), ""),
    ],
)
def test_unit_tests_that_no_words_can_hold(test, thought):
    with pytest.raises(ConfigError, match=r"the unit test could not be read back from its words: UnitTest\("):
        CompactTestFormat().answer(word_tokenizer(), test, thought)


PIECES = [
    *("```", "````", "~~~", "`", "```python\n", "```cpp\n", "```\n", "    ```\n", "\n", "\r\n", "\r", " ", "\t", "\0", "\ud800"),
    *("\u2028", "\x0c", "\x85", "</think>", "<think>", "**Input**\n", "**Output**\n", "Output:", "### Input", "print(1)\n"),
    *(":", "=", " : ", " = ", "2 3", "é🙂", "\x1b[0m", "*" * 50, "1." * 20),
]
SEEDS = [GOOD_TEST, f"Hm.\n```python\n{PROGRAM}\n```", "2 3 : sum = 5", f"<think>{GOOD_TEST}</think>\n```py\n1\n```\n{GOOD_TEST}"]


def mutated(rng: Random) -> str:
    text = rng.choice(SEEDS)
    for _ in range(rng.randrange(1, 8)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 0, 1, 3, 20)))
        noise = "".join(map(chr, rng.choices(range(0x11000), k=5)))
        text = text[:start] + rng.choice([*PIECES, noise, text]) + text[end:]
    return text


def test_no_text_raises():
    rng = Random(0)
    policy, writer, compact = CodePolicyFormat(), CodeTestFormat(), CompactTestFormat()
    programs, tests, words = 0, 0, 0
    for _ in range(3000):
        text = mutated(rng)
        program, test, short = policy.parse(text, SUM), writer.parse(text), compact.parse(text)
        if program is not None:
            programs += 1
            assert program.strip()
            assert "\0" not in program
            assert program.encode()
        for found in (test, short):
            if found is not None:
                assert found.stdout.strip()
                assert found.stdin == "" or (found.stdin.endswith("\n") and not found.stdin.endswith("\n\n"))
                assert (found.stdin + found.stdout).encode()
        tests += test is not None
        words += short is not None
    assert min(programs, tests, words) > 100  # the texts are not all hopeless


FLOODS = [
    *("`", "```", "```\n", "```python\n1\n```\n", "~~~\n", "\t```\n", "``` ", "`a", "\n", "\r", " ", "\t\n", "*", "1. "),
    *("</think>", "</think>\n```\n", "**Input**", "**Input**\n", f"{GOOD_TEST}\n", "test ", ": ", "= ", "x", "\0", "\ud800"),
]


@pytest.mark.parametrize("piece", FLOODS)
def test_a_megabyte_is_read_in_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    CodePolicyFormat().parse(f"```python\n{text}", SUM)
    CodeTestFormat().parse(text)
    CodeTestFormat().parse(f"**Input**\n```\n1\n```\n{text}\n**Output**\n```\n1\n```")
    CompactTestFormat().parse(text)
    assert time.process_time() - start < 10  # a quadratic reader would take hours


@pytest.mark.parametrize("template", [CHAT, None])
def test_a_worked_example_comes_before_the_problem(template):
    tokenizer = byte_tokenizer(template)
    program = tokenizer.decode(CodePolicyFormat(worked_example=True).prompt(tokenizer, [], SUM))
    test = tokenizer.decode(CodeTestFormat(worked_example=True).prompt(tokenizer, SUM))
    for shown, answer in ((program, "```python\na, b = map(int, input().split())\nprint(a - b)\n```"),
                          (test, "**Input**\n```\n4 9\n```\n\n**Output**\n```\n-5\n```")):  # fmt: skip
        assert shown.index("the first minus the second") < shown.index(answer) < shown.index(SUM.text)
        assert shown.count("the first minus the second") == 1
    if template is not None:
        assert f"{START}assistant\n```python\na, b" in program
    plain = tokenizer.decode(CodePolicyFormat().prompt(tokenizer, [], SUM))
    assert "minus" not in plain
    assert program.endswith(plain.removeprefix(f"{START}system\n"))
