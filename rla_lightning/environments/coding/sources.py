"""Where problems come from: JSON files and the layouts of public datasets.

A row that breaks its layout is an error; a row that is fine but asks for something else than a program
which reads stdin and writes stdout is left out and counted.
"""

from __future__ import annotations

import base64
import io
import pickle
import pickletools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, get_args

from rla_lightning.environments.coding.problems import (
    CENTRES,
    LEVELS,
    LONGEST_TIME_LIMIT,
    FieldError,
    Problem,
    RawT,
    RowError,
    UnusableRow,
    collect,
    json_of,
    level_of,
    number_of,
    paired_tests,
    problem_from,
    tests_to_keep,
    text_of,
    texts_of,
    time_limit_of,
)
from rla_lightning.types import ConfigError, UnitTest

Columns = Literal["code_contests", "livecodebench", "livebench"]
Row = Mapping[str, Any]

LARGEST_UNPACKED = 1 << 30  # bytes of one row's packed tests
MAX_WRONG_SOLUTIONS = 4
CALLS_A_FUNCTION = "the tests call a function"


class ProblemSource(Protocol):
    """Anything that has problems; one can be named in YAML by its class_path."""

    def load(self) -> list[Problem]: ...


class JsonProblems:
    """Problems in a JSON file: rows with the fields of `Problem`, or with those of the RLAnything release.

    The release's fields are question, test_input, test_output, test_method and test_time_limit; others are ignored.

    Args:
        path: a .jsonl file (one row per line) or a .json file (a list of rows).
        limit: read no more than this many problems.
        max_tests: keep at most this many tests of a problem, the smallest.
    """

    def __init__(self, path: Path, limit: int | None = None, max_tests: int = 16) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".json", ".jsonl"):
            raise ConfigError(f"problems are read from .json and .jsonl files, got '{path}'")
        if not self.path.is_file():
            raise ConfigError(f"there is no file of problems at '{path}'")
        self.limit, self.max_tests = _checked_counts(limit, max_tests)

    def load(self) -> list[Problem]:
        if self.path.suffix == ".jsonl":
            return collect(self.path.name, self._lines(), lambda number, line: self._problem(number, json_of(line)), self.limit)
        try:
            rows = json_of(self.path.read_bytes())
        except RowError as error:
            raise ConfigError(f"{self.path.name}: {error}") from error
        if not isinstance(rows, list):
            raise ConfigError(f"{self.path.name} must hold a list of rows, got {type(rows).__name__}")
        return collect(self.path.name, _numbered("item", rows, first=1), self._problem, self.limit)

    def _lines(self) -> Iterator[tuple[str, int, bytes]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(map(bytes.strip, file), 1):
                if line:
                    yield f"line {number}", number, line

    def _problem(self, number: int, row: object) -> Problem:
        if not isinstance(row, dict):
            raise RowError(f"a row must be an object, got {type(row).__name__}")
        is_release = "tests" not in row and not row.keys().isdisjoint({"test_input", "test_output", "test_method"})
        spec = {"name": f"{self.path.stem}-{number}"} | (_release_spec(row) if is_release else row)
        if "difficulty" not in spec and spec.get("level") in LEVELS:
            spec["difficulty"] = CENTRES[spec["level"]]
        problem = problem_from(spec)
        return replace(problem, tests=tests_to_keep((), problem.tests, self.max_tests))


class DatasetProblems:
    """Problems of a public dataset; needs the `datasets` package, which never runs code of the dataset.

    Args:
        name: on the hub, or a local folder or file: parquet, JSON, CSV or what `save_to_disk` wrote.
        split: of the dataset; a single file, or a folder that was saved without splits, is all of it.
        columns: whose layout the rows have.
        subset: the dataset's configuration, where it has several.
        limit: read no more than this many problems.
        max_tests: keep at most this many tests of a problem: the public ones, then the smallest.
        revision: of the dataset on the hub.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        columns: Columns = "code_contests",
        subset: str | None = None,
        limit: int | None = None,
        max_tests: int = 16,
        revision: str | None = None,
    ) -> None:
        if columns not in _LAYOUTS:
            raise ConfigError(f"columns must be one of {', '.join(get_args(Columns))}, got {columns!r}")
        looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in _FILE_KINDS
        if not name or (looks_local and not Path(name).expanduser().exists()):
            raise ConfigError(f"there is no dataset at '{name}'")
        if find_spec("datasets") is None:
            raise ConfigError("datasets are read with a package that is not here: pip install 'rla_lightning[datasets]'")
        self.name, self.split, self.columns, self.subset, self.revision = name, split, columns, subset, revision
        self.limit, self.max_tests = _checked_counts(limit, max_tests)

    def load(self) -> list[Problem]:
        layout = _LAYOUTS[self.columns]
        dataset = self._dataset()
        missing = [column for column in layout.columns if column not in dataset.column_names]
        if missing:
            found = ", ".join(dataset.column_names)
            raise ConfigError(f"dataset '{self.name}' has no column {missing[0]!r} of {self.columns}; it has {found}")
        names: set[str] = set()

        def read(number: int, row: Row) -> Problem:
            problem = layout.read(row, self.max_tests)
            name = problem.name or f"row {number}"
            unique = f"{name} (row {number})" if name in names else name  # contests of two sites may share a name
            names.add(unique)
            return replace(problem, name=unique)

        return collect(self.name, _numbered("row", dataset, first=0), read, self.limit)

    def _dataset(self) -> Any:
        import datasets  # noqa: PLC0415 (optional, and slow to import)

        path = Path(self.name).expanduser()
        try:
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                saved = datasets.load_from_disk(str(path))
                if isinstance(saved, datasets.Dataset):
                    return saved
                if self.split not in saved:
                    raise ValueError(f"it has no split {self.split!r}, only {', '.join(saved)}")
                return saved[self.split]
            if path.is_file():
                if path.suffix not in _FILE_KINDS:
                    raise ValueError(f"a file must end in {', '.join(_FILE_KINDS)}")
                return datasets.load_dataset(_FILE_KINDS[path.suffix], data_files={self.split: str(path)}, split=self.split)
            name = str(path) if path.exists() else self.name
            return datasets.load_dataset(name, self.subset, split=self.split, revision=self.revision)
        # Of the package: unknown names, splits and configurations, no connection, broken files, datasets that are scripts
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise ConfigError(f"cannot read dataset '{self.name}': {error}") from error


# Rows of any kind


def _checked_counts(limit: int | None, max_tests: int) -> tuple[int | None, int]:
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    if max_tests < 1:
        raise ConfigError(f"max_tests must be at least 1, got {max_tests}")
    return limit, max_tests


def _numbered(word: str, rows: Iterable[RawT], first: int) -> Iterator[tuple[str, int, RawT]]:
    for number, row in enumerate(rows, first):
        yield f"{word} {number}", number, row


def _release_spec(row: Row) -> dict[str, Any]:
    """A row of the RLAnything release with the fields of a problem."""
    method = row.get("test_method") or "stdio"
    if method == "function":
        raise UnusableRow(CALLS_A_FUNCTION)
    if method != "stdio":
        raise FieldError("test_method", f"must be 'stdio' or 'function', got {method!r}")
    for field in ("test_input", "test_output"):
        if field not in row:
            raise FieldError(field, "is missing")
    tests = paired_tests(("test_input", "test_output"), row["test_input"], row["test_output"])
    if not tests:
        raise FieldError("test_input", "is empty; a problem needs at least one test")
    spec = {key: row[key] for key in ("name", "question") if key in row}
    if row.get("test_time_limit") is not None:
        spec["time_limit"] = time_limit_of("test_time_limit", row["test_time_limit"])
    return spec | {"tests": [{"stdin": test.stdin, "stdout": test.stdout} for test in tests]}


def _question(field: str, value: object) -> str:
    text = text_of(field, value)
    if not text.strip():
        raise UnusableRow("no question")
    return text


# deepmind/code_contests, see contest_problem.proto of google-deepmind/code_contests

_PYTHON_3 = 3  # of enum Solution.Language
_EASIEST_RATING, _HARDEST_RATING = 800, 3500  # of Codeforces
_GRADES = {1: 0.175, 2: 0.525, 3: 0.75, 4: 0.85, 5: 0.95}  # EASY, MEDIUM, HARD, HARDER, HARDEST
_GRADE_A, _GRADE_V = 7, 28  # a problem's place in its contest, as the dataset numbers the letters


def _code_contests(row: Row, max_tests: int) -> Problem:
    if row.get("input_file") or row.get("output_file"):
        raise UnusableRow("it reads or writes files")
    programs = _python_programs("solutions", row["solutions"])
    if not programs:
        raise UnusableRow("no solution in Python 3")
    difficulty = _contest_difficulty(row.get("cf_rating"), row.get("difficulty"))
    others = [test for field in ("private_tests", "generated_tests") for test in _contest_tests(field, row[field])]
    return Problem(
        name=text_of("name", row.get("name", "")),
        question=_question("description", row["description"]),
        tests=tests_to_keep(_contest_tests("public_tests", row["public_tests"]), others, max_tests),
        time_limit=_contest_seconds(row.get("time_limit")),
        difficulty=difficulty,
        level=level_of(difficulty),
        solution=min(programs, key=len),
        wrong_solutions=tuple(_python_programs("incorrect_solutions", row.get("incorrect_solutions"))[:MAX_WRONG_SOLUTIONS]),
    )


def _struct(field: str, value: object, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """The value, if it has the keys; a struct that is null has null under each of them."""
    if value is None:
        return dict.fromkeys(keys)
    if not isinstance(value, Mapping) or any(key not in value for key in keys):
        raise FieldError(field, f"must have {' and '.join(keys)}")
    return value


def _contest_tests(field: str, value: object) -> tuple[UnitTest, ...]:
    tests = _struct(field, value, ("input", "output"))
    return paired_tests((f"{field}.input", f"{field}.output"), tests["input"] or [], tests["output"] or [])


def _python_programs(field: str, value: object) -> list[str]:
    """The different programs in Python 3, in their order."""
    programs = _struct(field, value, ("language", "solution"))
    languages, texts = programs["language"] or [], texts_of(f"{field}.solution", programs["solution"] or [])
    if len(languages) != len(texts):
        raise FieldError(f"{field}.language", f"has {len(languages)} items, {field}.solution has {len(texts)}")
    chosen = (text for language, text in zip(languages, texts, strict=True) if language == _PYTHON_3 and text.strip())
    return list(dict.fromkeys(chosen))


def _contest_seconds(value: object) -> float:
    limit = _struct("time_limit", value, ("seconds", "nanos"))
    seconds = number_of("time_limit.seconds", limit["seconds"] or 0) + number_of("time_limit.nanos", limit["nanos"] or 0) / 1e9
    if seconds < 0:
        raise FieldError("time_limit", f"must not be negative, got {seconds:g}")
    return min(seconds, LONGEST_TIME_LIMIT) or Problem.time_limit  # 0 stands for unknown


def _contest_difficulty(rating: object, grade: object) -> float:
    """From 0 to 1, by the rating where there is one: grades of different sites do not compare."""
    if rating:  # 0 and null stand for unknown
        share = (number_of("cf_rating", rating) - _EASIEST_RATING) / (_HARDEST_RATING - _EASIEST_RATING)
        return min(max(share, 0.0), 1.0)
    number = int(number_of("difficulty", grade or 0))
    if _GRADE_A <= number <= _GRADE_V:
        return min(0.1 + 0.15 * (number - _GRADE_A), 1.0)
    return _GRADES.get(number, Problem.difficulty)


# livecodebench/code_generation_lite and livebench/coding, which took over its fields

_TEXT_OPCODES = frozenset(("PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINPUT", "MEMOIZE", "STOP"))
_BAD_PICKLE = (ValueError, TypeError, LookupError, AttributeError, EOFError, pickle.UnpicklingError)


class TextUnpickler(pickle.Unpickler):
    """An unpickler that looks up nothing, so that no pickle can make it call anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def text_of_pickle(data: bytes) -> str:
    """The text that an untrusted pickle holds.

    Raises:
        pickle.UnpicklingError: if there is anything else in it.
    """
    try:
        # Other opcodes could still fill the memory or hash for ever, without a single look-up.
        strange = {opcode.name for opcode, _, _ in pickletools.genops(data)} - _TEXT_OPCODES
        if strange:
            raise pickle.UnpicklingError(f"it has {', '.join(sorted(strange))}")
        text = TextUnpickler(io.BytesIO(data)).load()
    except _BAD_PICKLE as error:
        raise pickle.UnpicklingError(f"not a pickled text: {error}") from error
    if not isinstance(text, str):
        raise pickle.UnpicklingError(f"not a pickled text but {type(text).__name__}")
    return text


def _livecodebench(row: Row, max_tests: int) -> Problem:
    if row.get("starter_code"):
        raise UnusableRow(CALLS_A_FUNCTION)
    return _judged(row, _question("question_content", row["question_content"]), row["difficulty"], max_tests)


def _livebench(row: Row, max_tests: int) -> Problem:
    if "completion" in text_of("task", row.get("task") or "") or row.get("partial_solution"):
        raise UnusableRow("it completes a given program")
    original = {} if row.get("original_json") is None else _struct("original_json", row["original_json"], ())
    if original.get("starter_code"):
        raise UnusableRow(CALLS_A_FUNCTION)
    if row["public_test_cases"] is None and row["private_test_cases"] is None:
        raise UnusableRow("no tests")  # later releases test some tasks with programs
    turns = texts_of("turns", row["turns"])
    if not turns:
        raise FieldError("turns", "is empty")
    return _judged(row, _question("turns", turns[0]), original.get("difficulty") or Problem.level, max_tests)


def _judged(row: Row, question: str, difficulty: object, max_tests: int) -> Problem:
    level = text_of("difficulty", difficulty)
    if level not in LEVELS:
        raise FieldError("difficulty", f"must be one of {', '.join(LEVELS)}, got {level!r}")
    return Problem(
        name=text_of("question_id", row.get("question_id", "")),
        question=question,
        tests=tests_to_keep(_test_cases(row, "public_test_cases"), _test_cases(row, "private_test_cases"), max_tests),
        difficulty=CENTRES[level],
        level=level,
    )


def _test_cases(row: Row, field: str) -> tuple[UnitTest, ...]:
    """Tests as JSON text, plain or packed."""
    text = text_of(field, row[field]).strip()
    try:
        cases = json_of(text if text.startswith("[") else _unpacked(field, text))
    except RowError as error:
        raise FieldError(field, f"holds {error}") from error
    if not isinstance(cases, list):
        raise FieldError(field, f"must be a list, got {type(cases).__name__}")
    return tuple(_test_case(f"{field}[{index}]", case) for index, case in enumerate(cases))


def _test_case(field: str, value: object) -> UnitTest:
    case = _struct(field, value, ("input", "output", "testtype"))
    if case["testtype"] == "functional":
        raise UnusableRow(CALLS_A_FUNCTION)
    if case["testtype"] != "stdin":
        raise FieldError(f"{field}.testtype", f"must be 'stdin' or 'functional', got {case['testtype']!r}")
    return UnitTest(text_of(f"{field}.input", case["input"]), text_of(f"{field}.output", case["output"]))


def _unpacked(field: str, text: str) -> str:
    """Undoes pickle, zlib and base64, in this order of packing."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_UNPACKED)
        if unpacker.unconsumed_tail:
            raise UnusableRow(f"the tests unpack to over {LARGEST_UNPACKED >> 20} MiB")
        return text_of_pickle(data)
    except (ValueError, zlib.error, pickle.UnpicklingError) as error:
        raise FieldError(field, f"is neither JSON nor packed JSON: {error}") from error


@dataclass(frozen=True)
class _Layout:
    columns: tuple[str, ...]  # without which a row cannot be read
    read: Callable[[Row, int], Problem]


_FILE_KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_TEST_CASES = ("public_test_cases", "private_test_cases")
_LAYOUTS: Mapping[str, _Layout] = {
    "code_contests": _Layout(("description", "public_tests", "private_tests", "generated_tests", "solutions"), _code_contests),
    "livecodebench": _Layout(("question_content", *_TEST_CASES, "difficulty"), _livecodebench),
    "livebench": _Layout(("turns", *_TEST_CASES), _livebench),
}
