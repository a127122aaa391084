"""Whether what a program printed is what a test expects.

Outputs come from programs that a model wrote, so they may be a megabyte of anything: every checker takes
linear time and never raises.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import starmap

Checker = Callable[[str, str, str], bool]  # stdin, expected, actual

TOLERANCE = 1e-6  # absolute or relative
LONGEST_NUMBER = 1000  # characters; a longer token is compared as text

# float() also reads "1_000", "nan" and the digits of every script, none of which a judge accepts.
_NUMBER = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")
_NAN = frozenset({"nan", "+nan", "-nan"})


def equal_tokens(stdin: str, expected: str, actual: str) -> bool:
    """The same tokens in the same order, however they are spaced."""
    return expected.split() == actual.split()


def equal_floats(stdin: str, expected: str, actual: str) -> bool:
    """Tokens that are the same or, as numbers, within the tolerance; nan equals nothing."""
    wanted, printed = expected.split(), actual.split()
    return len(wanted) == len(printed) and all(starmap(_is_close, zip(wanted, printed, strict=True)))


def equal_unordered(stdin: str, expected: str, actual: str) -> bool:
    """The same tokens, each as often, in any order."""
    return Counter(expected.split()) == Counter(actual.split())


def equal_lines(stdin: str, expected: str, actual: str) -> bool:
    """The same lines up to white space at their ends and blank lines at the end."""
    return _lines(expected) == _lines(actual)


CHECKERS: Mapping[str, Checker] = {
    "tokens": equal_tokens,
    "floats": equal_floats,
    "unordered": equal_unordered,
    "lines": equal_lines,
}


def _is_close(wanted: str, printed: str) -> bool:
    if wanted == printed:
        return wanted.lower() not in _NAN
    a, b = _finite(wanted), _finite(printed)
    return a is not None and b is not None and math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _finite(token: str) -> float | None:
    if len(token) > LONGEST_NUMBER or not _NUMBER.fullmatch(token):
        return None
    value = float(token)
    return value if math.isfinite(value) else None  # "1e999999" overflows to infinity


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]  # splitlines() would also split at form feeds and the like
    while lines and not lines[-1]:
        lines.pop()
    return lines
