"""Sources of problems: JSON files and small datasets in the layouts of public ones, read by the real library."""

import base64
import json
import logging
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rla_lightning.environments.coding.problems import Problem, problem_from
from rla_lightning.environments.coding.sources import DatasetProblems, JsonProblems, TextUnpickler, text_of_pickle
from rla_lightning.types import ConfigError, UnitTest

SPEC = {
    "name": "double",
    "question": "Print twice the number.",
    "tests": [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "-1", "stdout": "-2"}],
    "time_limit": 1.5,
    "checker": "floats",
    "difficulty": 0.8,
    "level": "hard",
    "solution": "print(2 * int(input()))",
    "wrong_solutions": ["print(4)"],
}
RELEASE = {
    "question": "Print twice the number.",
    "test_input": ["1\n", "2\n"],
    "test_output": ["2\n", "4\n"],
    "test_method": "stdio",
    "test_time_limit": 1,
    "example_input": ["7"],
    "example_output": ["14"],
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


# JSON files


def test_both_kinds_of_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "set.jsonl", SPEC, "", RELEASE, {"level": "easy"} | {k: SPEC[k] for k in ("question", "tests")})
    source = pickle.loads(pickle.dumps(JsonProblems(path)))
    first, second, third = source.load()
    assert first == problem_from(SPEC)
    assert second == Problem(
        "set-3", "Print twice the number.", (UnitTest("1\n", "2\n"), UnitTest("2\n", "4\n")), 1.0, "tokens", 0.5, "medium"
    )
    assert (third.name, third.level, third.difficulty) == ("set-4", "easy", 0.175)


def test_rows_of_the_release_that_ask_for_something_else_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [RELEASE, RELEASE | {"test_method": "function"}, RELEASE | {"test_method": None}]
    with caplog.at_level("INFO"):
        problems = JsonProblems(write_lines(tmp_path / "set.jsonl", *rows)).load()
    assert [problem.name for problem in problems] == ["set-1", "set-3"]
    assert "the tests call a function" in caplog.text


def test_a_list_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps([RELEASE, SPEC]))
    assert [problem.name for problem in JsonProblems(path).load()] == ["set-1", "double"]
    path.write_text(json.dumps([RELEASE, 3]))
    with pytest.raises(ConfigError, match=r"^set\.json item 2: a row must be an object, got int$"):
        JsonProblems(path).load()
    path.write_text('[{"a": 1},\n {"a" 2}]')
    with pytest.raises(ConfigError, match=r"^set\.json: invalid JSON: Expecting ':' delimiter at line 2 column 7$"):
        JsonProblems(path).load()
    path.write_text(json.dumps(SPEC))
    with pytest.raises(ConfigError, match=r"^set\.json must hold a list of rows, got dict$"):
        JsonProblems(path).load()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (RELEASE | {"test_output": ["2\n"]}, "field 'test_output' has 1 items, test_input has 2"),
        (RELEASE | {"test_output": [1, 2]}, "field 'test_output[0]' must be text, got int"),
        (RELEASE | {"test_input": [], "test_output": []}, "field 'test_input' is empty; a problem needs at least one test"),
        (RELEASE | {"test_method": "files"}, "field 'test_method' must be 'stdio' or 'function', got 'files'"),
        (RELEASE | {"test_time_limit": 0}, "field 'test_time_limit' must be in (0, 60] seconds, got 0"),
        ({"question": "a", "test_input": ["1"]}, "field 'test_output' is missing"),
        ({"question": "a"}, "field 'tests' is missing"),
        (SPEC | {"example_input": []}, "field 'example_input' is unknown; a problem has name, "),
        (SPEC, "field 'name' repeats 'double'"),
        ('{"a": 1', "invalid JSON: Expecting ',' delimiter at column 8"),
        ('{"a": ' + "1" * 5000 + "}", "invalid JSON: Exceeds the limit"),
        ("[" * 100_000, "invalid JSON: maximum recursion depth exceeded"),
        ("[1]", "a row must be an object, got list"),
    ],
)
def test_a_malformed_row_is_located(tmp_path: Path, row: object, message: str) -> None:
    path = write_lines(tmp_path / "set.jsonl", SPEC, row)
    with pytest.raises(ConfigError) as caught:
        JsonProblems(path).load()
    assert str(caught.value).startswith(f"set.jsonl line 2: {message}")


def test_malformed_rows_are_one_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "problems.jsonl", SPEC, RELEASE | {"test_input": ["1", "2", "3", "4"]}, "{", SPEC | {"name": 1})
    with pytest.raises(ConfigError) as caught:
        JsonProblems(path).load()
    message = "problems.jsonl line 2: field 'test_output' has 2 items, test_input has 4 (and 2 more malformed rows)"
    assert str(caught.value) == message
    assert len(JsonProblems(path, limit=1).load()) == 1  # nothing after the last problem is read


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"^set\.jsonl line 1: invalid JSON: 'utf-8' codec can't decode byte 0xff"):
        JsonProblems(path).load()
    path.write_bytes(b"\n\n")
    with pytest.raises(ConfigError, match=r"^set\.jsonl has no problem to use$"):
        JsonProblems(path).load()


def test_which_tests_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tests = [{"stdin": "1" * size, "stdout": "ä"} for size in (50, 65_535, 3, 40, 65_534, 3)]  # ä is two bytes
    large = SPEC | {"name": "large", "tests": [tests[1]]}
    path = write_lines(tmp_path / "set.jsonl", SPEC | {"tests": tests}, large)
    with caplog.at_level(logging.WARNING):
        (problem,) = JsonProblems(path, max_tests=3).load()
    assert [len(test.stdin) for test in problem.tests] == [50, 3, 40]
    assert [record.getMessage() for record in caplog.records] == ["set.jsonl: rows were left out: every test is over 64 KiB (1)"]
    (problem,) = JsonProblems(path).load()
    assert [len(test.stdin) for test in problem.tests] == [50, 3, 40, 65_534]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: JsonProblems(folder / "none.jsonl"), "there is no file of problems at '.*none.jsonl'"),
        (JsonProblems, "problems are read from .json and .jsonl files, got "),
        (lambda folder: JsonProblems(write_lines(folder / "a.json"), limit=0), "limit must be at least 1, got 0"),
        (lambda folder: JsonProblems(write_lines(folder / "a.json"), max_tests=0), "max_tests must be at least 1, got 0"),
        (lambda folder: DatasetProblems("a/b", columns="apps"), "columns must be one of code_contests, .*, got 'apps'"),
        (lambda folder: DatasetProblems(str(folder / "none")), "there is no dataset at '.*none'"),
        (lambda folder: DatasetProblems("none.parquet"), "there is no dataset at 'none.parquet'"),
        (lambda folder: DatasetProblems(""), "there is no dataset at ''"),
        (lambda folder: DatasetProblems("a/b", limit=-1), "limit must be at least 1, got -1"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


# Datasets


def saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def contest(**changes: Any) -> dict[str, Any]:
    """A row of code_contests."""
    row = {
        "name": "1_A. Double",
        "description": "Print twice the number.",
        "public_tests": {"input": ["1\n", "22\n"], "output": ["2\n", "44\n"]},
        "private_tests": {"input": ["333\n"], "output": ["666\n"]},
        "generated_tests": {"input": ["4\n", "1\n"], "output": ["8\n", "2\n"]},
        "source": 2,
        "difficulty": 7,
        "solutions": {
            "language": [2, 3, 3, 1],
            "solution": ["int main(){}", "n = int(input())\nprint(n * 2)", "print(int(input()) * 2)", "print"],
        },
        "incorrect_solutions": {
            "language": [3, 4, 3, 3, 3, 3, 3],
            "solution": ["print(1)", "class A", "print(2)", "print(1)", "print(3)", "print(4)", "print(5)"],
        },
        "cf_rating": 1340,
        "time_limit": {"seconds": 1, "nanos": 500_000_000},
        "input_file": "",
        "output_file": "",
    }
    return row | changes


def test_code_contests(tmp_path: Path) -> None:
    source = DatasetProblems(saved(tmp_path, [contest()]), columns="code_contests")
    (problem,) = pickle.loads(pickle.dumps(source)).load()
    assert problem == Problem(
        name="1_A. Double",
        question="Print twice the number.",
        tests=(UnitTest("1\n", "2\n"), UnitTest("22\n", "44\n"), UnitTest("333\n", "666\n"), UnitTest("4\n", "8\n")),
        time_limit=1.5,
        checker="tokens",
        difficulty=0.2,  # (1340 - 800) / 2700
        level="easy",
        solution="print(int(input()) * 2)",
        wrong_solutions=("print(1)", "print(2)", "print(3)", "print(4)"),
    )
    (problem,) = DatasetProblems(saved(tmp_path / "2", [contest()]), max_tests=3).load()
    assert [test.stdin for test in problem.tests] == ["1\n", "22\n", "4\n"]  # public, then the smallest


@pytest.mark.parametrize(
    ("changes", "difficulty", "level"),
    [
        ({"cf_rating": 4000}, 1.0, "hard"),
        ({"cf_rating": 500}, 0.0, "easy"),
        ({"cf_rating": 0, "difficulty": 7}, 0.1, "easy"),  # the contest's problem A
        ({"cf_rating": 0, "difficulty": 10}, 0.55, "medium"),  # D
        ({"cf_rating": 0, "difficulty": 28}, 1.0, "hard"),
        ({"cf_rating": 0, "difficulty": 1}, 0.175, "easy"),
        ({"cf_rating": 0, "difficulty": 3}, 0.75, "hard"),
        ({"cf_rating": 0, "difficulty": 0}, 0.5, "medium"),
        ({"cf_rating": None, "difficulty": 6}, 0.5, "medium"),
    ],
)
def test_difficulty_of_a_contest(tmp_path: Path, changes: dict[str, Any], difficulty: float, level: str) -> None:
    (problem,) = DatasetProblems(saved(tmp_path, [contest(**changes)])).load()
    assert problem.difficulty == pytest.approx(difficulty)
    assert problem.level == level


def test_contests_that_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    none: dict[str, list[str]] = {"input": [], "output": []}
    rows = [
        contest(),
        contest(time_limit=None, cf_rating=None),  # of the same name
        contest(name="files", input_file="input.txt"),
        contest(name="cpp", solutions={"language": [2], "solution": ["int main(){}"]}),
        contest(name="untested", public_tests=none, private_tests=none, generated_tests=none),
        contest(name="pictures", description="\n"),
        contest(name="slow", time_limit={"seconds": 100, "nanos": 0}, private_tests=None),
    ]
    with caplog.at_level(logging.WARNING):
        problems = DatasetProblems(saved(tmp_path, rows)).load()
    assert [(problem.name, problem.time_limit) for problem in problems] == [
        ("1_A. Double", 1.5),
        ("1_A. Double (row 1)", 2.0),
        ("slow", 60.0),
    ]
    message = "rows were left out: it reads or writes files (1), no question (1), no solution in Python 3 (1), no tests (1)"
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / 'saved'}: {message}"]
    assert [problem.name for problem in DatasetProblems(str(tmp_path / "saved"), limit=1).load()] == ["1_A. Double"]


def test_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no problem to use; rows were left out: it reads or writes files \(1\)$"):
        DatasetProblems(saved(tmp_path, [contest(output_file="o.txt")])).load()


def test_malformed_rows_of_a_dataset(tmp_path: Path) -> None:
    uneven = contest(private_tests={"input": ["1"], "output": []})
    with pytest.raises(ConfigError) as caught:
        DatasetProblems(saved(tmp_path, [contest(), uneven, uneven])).load()
    message = "row 1: field 'private_tests.output' has 0 items, private_tests.input has 1 (and 1 more malformed row)"
    assert str(caught.value) == f"{tmp_path / 'saved'} {message}"


CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
HIDDEN = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}, {"input": "1\n", "output": "2\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "1", "output": "2", "testtype": "functional"}]
BOTH = (UnitTest("1\n", "2\n"), UnitTest("3\n", "6\n"))


def packed(value: object) -> str:
    """As LiveCodeBench packs hidden tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


def lcb(**changes: Any) -> dict[str, Any]:
    """A row of livecodebench."""
    row = {
        "question_title": "Double",
        "question_content": "Print twice the number.",
        "platform": "atcoder",
        "question_id": "abc1_a",
        "starter_code": "",
        "difficulty": "hard",
        "public_test_cases": json.dumps(CASES),
        "private_test_cases": packed(HIDDEN),
        "metadata": "{}",
    }
    return row | changes


def test_livecodebench(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        lcb(),
        lcb(question_id="plain", private_test_cases=json.dumps(HIDDEN), difficulty="easy"),
        lcb(question_id="starter", starter_code="class Solution:"),
        lcb(question_id="function", private_test_cases=packed(FUNCTIONAL)),
    ]
    with caplog.at_level(logging.WARNING):
        first, second = DatasetProblems(saved(tmp_path, rows), columns="livecodebench").load()
    assert first == Problem("abc1_a", "Print twice the number.", BOTH, difficulty=0.85, level="hard")
    assert second == Problem("plain", "Print twice the number.", BOTH, difficulty=0.175, level="easy")
    assert caplog.records[-1].getMessage().endswith("saved: rows were left out: the tests call a function (2)")


class Malicious:
    """Its pickle writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path, str], int], tuple[Path, str]]:
        return Path.write_text, (self.path, "owned")


def test_a_malicious_pickle_is_not_run(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    pickle.loads(pickle.dumps(Malicious(owned)))
    assert owned.read_text() == "owned"  # so it does what it is meant to
    owned.unlink()
    text = base64.b64encode(zlib.compress(pickle.dumps(Malicious(owned)))).decode()
    with pytest.raises(ConfigError, match="field 'private_test_cases' is neither JSON nor packed JSON: not a pickled text"):
        DatasetProblems(saved(tmp_path, [lcb(private_test_cases=text)]), columns="livecodebench").load()
    assert not owned.exists()


def test_the_unpickler_looks_nothing_up(tmp_path: Path) -> None:
    import io

    for value in (Malicious(tmp_path / "owned"), print, Path):
        with pytest.raises(pickle.UnpicklingError, match="it asks for "):
            TextUnpickler(io.BytesIO(pickle.dumps(value))).load()
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04.",
        b"hello",
        pickle.dumps(["text"]),
        pickle.dumps(b"text"),
        pickle.dumps("text")[:-1],
        b"\x80\x04X\xff\xff\xff\x7fab.",  # a text of two gigabytes, of which two bytes are there
        b"\x80\x02X\x01\x00\x00\x00ar\xff\xff\xff\x7f.",  # asks for a table of two thousand million entries
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    ],
)
def test_pickles_of_anything_but_a_text(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"^not a pickled text"):
        text_of_pickle(data)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickled_texts(protocol: int) -> None:
    assert text_of_pickle(pickle.dumps("täxt" * 100, protocol)) == "täxt" * 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"private_test_cases": "%%%"}, "field 'private_test_cases' is neither JSON nor packed JSON: "),
        ({"private_test_cases": packed("x")[:-8]}, "field 'private_test_cases' is neither JSON nor packed JSON: "),
        ({"private_test_cases": packed({"a": 1})}, "field 'private_test_cases' must be a list, got dict"),
        ({"public_test_cases": "[1"}, "field 'public_test_cases' holds invalid JSON: Expecting ',' delimiter at column 3"),
        ({"public_test_cases": "[1]"}, "field 'public_test_cases[0]' must have input and output and testtype"),
        (
            {"public_test_cases": json.dumps([CASES[0] | {"testtype": "file"}])},
            "field 'public_test_cases[0].testtype' must be 'stdin' or 'functional', got 'file'",
        ),
        (
            {"public_test_cases": json.dumps([CASES[0] | {"output": 2}])},
            "field 'public_test_cases[0].output' must be text, got int",
        ),
        ({"difficulty": "insane"}, "field 'difficulty' must be one of easy, medium, hard, got 'insane'"),
        ({"question_content": None}, "field 'question_content' must be text, got null"),
    ],
)
def test_malformed_rows_of_livecodebench(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DatasetProblems(saved(tmp_path, [lcb(**changes)]), columns="livecodebench").load()
    assert str(caught.value).startswith(f"{tmp_path / 'saved'} row 0: {message}")


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rla_lightning.environments.coding.sources.LARGEST_UNPACKED", 1 << 20)
    bomb = base64.b64encode(zlib.compress(pickle.dumps(" " * (1 << 24)))).decode()
    with pytest.raises(ConfigError, match=r"rows were left out: the tests unpack to over 1 MiB \(1\)$"):
        DatasetProblems(saved(tmp_path, [lcb(private_test_cases=bomb)]), columns="livecodebench").load()


def test_livebench(tmp_path: Path) -> None:
    original = {"question_content": "Print twice the number.", "difficulty": "medium", "starter_code": "", "metadata": "{}"}
    row = {
        "question_id": "7f",
        "category": "coding",
        "turns": ["### Question:\nPrint twice the number."],
        "question_title": "Double",
        "public_test_cases": json.dumps(CASES),
        "private_test_cases": packed(HIDDEN),
        "original_json": original,
        "partial_solution": None,
        "task": "LCB_generation",
    }
    rows = [
        row | {"question_id": "8f", "task": "coding_completion", "partial_solution": "def"},
        row,
        row | {"question_id": "9f", "original_json": original | {"starter_code": "class Solution:"}},
        row | {"question_id": "af", "public_test_cases": json.dumps(FUNCTIONAL)},
        row | {"question_id": "bf", "original_json": None, "private_test_cases": json.dumps([])},
    ]
    source = DatasetProblems(saved(tmp_path, rows), split="test", columns="livebench")
    first, second = source.load()
    assert first == Problem("7f", "### Question:\nPrint twice the number.", BOTH, difficulty=0.525, level="medium")
    assert (second.name, second.level, second.tests) == ("bf", "medium", (UnitTest("1\n", "2\n"),))


def test_files_and_folders(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([lcb(), lcb(question_id="other")])
    (tmp_path / "folder").mkdir()
    rows.to_parquet(str(tmp_path / "folder" / "test.parquet"))
    rows.to_json(str(tmp_path / "rows.jsonl"))
    rows.to_csv(str(tmp_path / "rows.csv"))
    DatasetDict({"train": rows.select([0]), "test": rows}).save_to_disk(str(tmp_path / "splits"))
    for name in ("folder", "folder/test.parquet", "rows.jsonl", "rows.csv", "splits"):
        problems = DatasetProblems(str(tmp_path / name), split="test", columns="livecodebench").load()
        assert [(problem.name, problem.tests) for problem in problems] == [("abc1_a", BOTH), ("other", BOTH)], name


def test_nested_columns_in_parquet(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([contest(), contest(time_limit=None)]).to_parquet(str(tmp_path / "rows.parquet"))
    first, second = DatasetProblems(str(tmp_path / "rows.parquet")).load()
    assert [test.stdin for test in first.tests] == ["1\n", "22\n", "333\n", "4\n"]
    assert (first.time_limit, second.time_limit) == (1.5, 2.0)


def test_datasets_that_cannot_be_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([lcb()])
    DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "broken.parquet").write_text("PAR1")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "folder").mkdir()
    rows.to_parquet(str(tmp_path / "folder" / "train.parquet"))
    with pytest.raises(ConfigError, match=r"cannot read dataset '.*splits': it has no split 'test', only train"):
        DatasetProblems(str(tmp_path / "splits"), split="test", columns="livecodebench").load()
    with pytest.raises(ConfigError, match=r"cannot read dataset '.*folder': Unknown split \"test\""):
        DatasetProblems(str(tmp_path / "folder"), split="test", columns="livecodebench").load()
    with pytest.raises(ConfigError, match=r"cannot read dataset '.*broken\.parquet': "):
        DatasetProblems(str(tmp_path / "broken.parquet")).load()
    with pytest.raises(ConfigError, match=r"cannot read dataset '.*notes\.txt': a file must end in \.parquet, \.json"):
        DatasetProblems(str(tmp_path / "notes.txt")).load()
    with pytest.raises(ConfigError, match="has no column 'description' of code_contests; it has question_title, "):
        DatasetProblems(str(tmp_path / "splits")).load()


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(name: str, subset: str | None, **options: object) -> None:
        assert (name, subset, options) == ("some/problems", "v1", {"split": "train", "revision": "abc"})
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ConfigError, match="cannot read dataset 'some/problems': no route"):
        DatasetProblems("some/problems", subset="v1", revision="abc").load()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'rla_lightning\[datasets\]'"):
        DatasetProblems("some/problems")
