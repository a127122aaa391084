"""Whether a program can be run on several inputs in one process; part of a worker's program, like `lockup.py`."""

from __future__ import annotations

import ast
import warnings

STATELESS = {  # modules that a program can use on one input after the other
    *("array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "enum", "fractions", "functools", "heapq"),
    *("io", "itertools", "math", "operator", "random", "re", "statistics", "string", "sys", "typing"),
}
HARMLESS = {  # what may be used of some of them
    "io": {"StringIO", "BytesIO", "TextIOWrapper"},
    "sys": {
        "stdin",
        "stdout",
        "stderr",
        "exit",
        "maxsize",
        "getrecursionlimit",
        "setrecursionlimit",
        "version_info",
        "float_info",
    },
}
REACHES_FAR = {
    *("open", "exec", "eval", "compile", "globals", "locals", "vars", "getattr", "setattr", "delattr", "breakpoint"),
    *("__builtins__", "__import__", "__loader__", "__spec__"),
}


def leaves_no_traces(program: str) -> bool:
    """Whether nothing that a program names could change what its next input finds in the same process.

    Only for equal results, not for safety: a program that hides what it does spoils its own results.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are told when the program is compiled
            tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            if not STATELESS.issuperset(alias.name for alias in node.names):
                return False
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            allowed = HARMLESS.get(node.module or "")
            if node.module not in STATELESS or (allowed and not allowed.issuperset(alias.name for alias in node.names)):
                return False
            imported |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in REACHES_FAR:
            return False
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            is_hidden = node.attr.startswith("__") and node.attr != "__init__"
            changes_module = owner in imported and owner != "sys" and not isinstance(node.ctx, ast.Load)
            if is_hidden or changes_module or node.attr not in HARMLESS.get(owner, (node.attr,)):
                return False
    return True
