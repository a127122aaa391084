from random import Random

import pytest

from rla_lightning.algorithm.acceptance import trigger
from rla_lightning.algorithm.acceptance_power import acceptance_power
from rla_lightning.feedback import decide_one
from rla_lightning.settings import AcceptanceSettings
from rla_lightning.types import Proposal, Task, Trial

G = 8
RATES = (0.02, 0.05, 0.10, 0.15, 0.20)


def power(settings: AcceptanceSettings, direction, parent, proposal):
    return acceptance_power(lambda *counts: decide_one(*counts, settings), direction, parent, proposal, G)


@pytest.mark.parametrize(("p", "expected"), [(0.02, 0.1297), (0.05, 0.2538), (0.10, 0.3895), (0.20, 0.6084)])
def test_the_papers_rule_accepts_unchanged_proposals(p, expected):
    # as worked out in test_acceptance.py; .02: P0 = .85076, P1 = .13890: (.85076 * .14924 + .13890 * .01034) / .98966
    threshold = AcceptanceSettings(rule="threshold")
    of_easier = power(threshold, "easier", p, p)
    assert of_easier.accepted == pytest.approx(expected, abs=1e-4)
    assert (of_easier.rollouts, of_easier.parent_rollouts) == (pytest.approx(8), 0)
    assert power(threshold, "harder", 1 - p, 1 - p).accepted == pytest.approx(expected, abs=1e-4)


def test_the_posterior_rule_keeps_its_promise():
    settings = AcceptanceSettings()
    for p in RATES:
        assert power(settings, "easier", p, p).accepted <= 0.05
        assert power(settings, "harder", 1 - p, 1 - p).accepted <= 0.05
    changed = power(settings, "harder", 0.95, 0.65)
    assert changed.accepted >= 0.7
    assert power(settings, "easier", 0.05, 0.35).accepted == pytest.approx(changed.accepted)  # the same, mirrored
    assert changed.rollouts + changed.parent_rollouts < 36


def test_enumeration_agrees_with_playing_it_out():
    settings = AcceptanceSettings(level=0.9, max_rerolls=2)
    rng = Random("play")
    accepted = rollouts = parents = plays = 0
    while plays < 4000:
        before = sum(rng.random() < 0.1 for _ in range(G))
        if trigger(before, G, 0.2, 0.8) != "easier":
            continue
        plays += 1
        trial: Trial | None = None
        while True:
            proposal = Proposal(Task("x", "", {}, 0.0, "x"), "easier", "parent", before, G, trial=trial)
            along = None if trial is None else (sum(rng.random() < 0.1 for _ in range(G)), G)
            decision = decide_one(proposal, sum(rng.random() < 0.3 for _ in range(G)), G, along, settings)
            rollouts, parents, trial = rollouts + G, parents + (G if along else 0), decision.trial
            if decision.verdict != "UNDECIDED":
                accepted += decision.verdict == "ACCEPT"
                break
    exact = power(settings, "easier", 0.1, 0.3)
    assert accepted / plays == pytest.approx(exact.accepted, abs=0.032)  # 4 standard errors
    assert rollouts / plays == pytest.approx(exact.rollouts, rel=0.03)
    assert parents / plays == pytest.approx(exact.parent_rollouts, rel=0.05)


def test_what_cannot_happen_is_refused():
    with pytest.raises(ValueError, match=r"success rate 1\.0 is never rewritten to be easier"):
        power(AcceptanceSettings(), "easier", 1.0, 1.0)
    with pytest.raises(ValueError, match=r"got 1\.2"):
        power(AcceptanceSettings(), "easier", 0.1, 1.2)
