"""The theory script: its claims hold, and would fail if they did not."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
NAMES = ["precision", "convergence", "zscore", "weights", "gradients", "acceptance"]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module("theory_claims")


@pytest.fixture
def main(claims: ModuleType) -> Callable[[list[str]], int]:
    return import_module("theory").main


def test_all_claims_hold_and_leave_their_numbers(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "new" / "folder")]) == 0
    printed = capsys.readouterr().out
    assert "FAILS" not in printed
    assert printed.endswith("6 of 6 claims hold\n")
    numbers = json.loads((tmp_path / "new" / "folder" / "theory.json").read_text())
    assert list(numbers) == NAMES
    for name, claim in numbers.items():
        assert f"{name} HOLDS" in printed
        assert claim["holds"] is True
        assert len(claim["checks"]) >= 3
        assert (tmp_path / "new" / "folder" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (precision,) = [r for r in numbers["precision"]["rows"] if (r["p_plus"], r["p_minus"], r["m"]) == (0.6, 0.6, 3)]
    assert precision["exact"] == pytest.approx(0.54432)  # worked out in test_precision.py
    assert precision["paper"] == pytest.approx(0.0295545, abs=1e-6)  # mu - 1 = .2: 1 - exp(-.03)
    assert precision["sampled"] == pytest.approx(0.54432, abs=0.005)
    middle = next(row for row in numbers["gradients"]["rows"] if row["success"] == 0.5)
    assert middle["dead"] == pytest.approx(2 / 256)
    assert middle["signal c"] == pytest.approx(0.4375)  # 2/4 * 7/8
    lambdas = {row["lambda"]: row["outcome alone, m = 3"] for row in numbers["zscore"]["rows"]}
    assert lambdas[2.9] == 1.0
    assert lambdas[3.0] == 10 / 16  # all but the 6 patterns with a majority of 2 against the outcome


def test_only_the_named_claims_are_checked(main: Callable[[list[str]], int], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--only", "acceptance"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"acceptance.png", "theory.json"}
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--only", "everything"])


def test_a_claim_that_fails_is_named_and_ends_with_status_one(
    main: Callable[[list[str]], int],
    claims: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(claims, "hoeffding_bound", lambda mu, m: 0.9)  # above the exact value of few votes
    assert main(["--out", str(tmp_path), "--only", "precision", "acceptance"]) == 1
    printed = capsys.readouterr().out
    assert "FAILS  no bound above the exact value in the table" in printed
    assert "precision FAILS" in printed
    assert "acceptance HOLDS" in printed
    assert printed.endswith("1 of 2 claims hold, precision FAILS\n")
    numbers = json.loads((tmp_path / "theory.json").read_text())
    assert [claim["holds"] for claim in numbers.values()] == [False, True]


@pytest.mark.parametrize(
    ("claim", "name", "wrong"),
    [
        ("precision", "exact_precision", lambda p_plus, p_minus, m: 0.95),
        ("convergence", "exact_precision", lambda p_plus, p_minus, m: 1 - 0.5**m),  # also for mu <= 1
        ("zscore", "largest_outcome_weight", float),  # right at m = 3 only
        ("weights", "paper_vote_weight", lambda p_agree, score_weight=1.0: 1.0 + score_weight * p_agree),
        ("gradients", "dead_share", lambda success, rollouts: success**rollouts),
        ("acceptance", "PAPER_FALSE_ACCEPTS", {0.02: 0.05}),
    ],
)
def test_every_claim_can_fail(claims: ModuleType, monkeypatch: pytest.MonkeyPatch, claim: str, name: str, wrong: object) -> None:
    monkeypatch.setattr(claims, name, wrong)
    assert not claims.CLAIMS[claim]().holds


def test_another_acceptance_rule_is_another_column(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(claims.ACCEPTANCE_RULES, "never", lambda direction, success: 0.0)
    acceptance = claims.CLAIMS["acceptance"]()
    assert acceptance.holds
    assert acceptance.columns == (
        "true success",
        *(f"{rule}, easier" for rule in ("threshold", "posterior", "never")),
        *(f"{rule}, harder at 1 - p" for rule in ("threshold", "posterior", "never")),
    )
    assert acceptance.rows[0][1:4:2] == (pytest.approx(0.1297, abs=1e-4), 0.0)
