"""Tests against the real engine: skipped where it is not installed, but not in continuous integration."""

import os
from importlib.util import find_spec

import pytest

ENGINE = ("textworld", "fast_downward", "alfworld")


@pytest.fixture(scope="session")
def needs_engine() -> None:
    missing = [name for name in ENGINE if find_spec(name) is None]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"not installed: {', '.join(missing)}; run make engine")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; run make engine")
