"""Questions of reasoning-gym: every family, its traps, and how tasks are rewritten."""

import json
import pickle
import random
import sys
from dataclasses import replace
from random import Random

import pytest

from rla_lightning.environments.reasoning_gym import ReasoningGymEnvironment
from rla_lightning.environments.reasoning_gym.families import (
    HARMLESS,
    HASH_DEPENDENT,
    REFUSED,
    curricula,
    draw_item,
    last_levels,
    score,
)
from rla_lightning.environments.reasoning_gym.spelling import read, shared_frame, spell
from rla_lightning.models.tokenizer import environment_tokenizer
from rla_lightning.rollout.formats import CompactPolicyFormat
from rla_lightning.rollout.formats_paper import PaperPolicyFormat
from rla_lightning.types import LOST, WON, ConfigError, ExpertAction, Observation, StepLabel, Task

FAMILIES = sorted(set(curricula()) - set(REFUSED))
SEVERAL_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # the library gives none
SECONDS = {"knight_swap", "sokoban"}  # to draw one item at all
SLOW = SECONDS | {"arc_agi", "countdown", "futoshiki", "group_anagrams", "jugs", "puzzle24", "sudoku"}
TINY = ("chain_sum", "leg_counting", "spell_backward")


@pytest.fixture(scope="module")
def tiny() -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment(TINY, max_level=2, spelled=True)


@pytest.fixture(scope="module")
def sums() -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment(["chain_sum"], max_level=4)


def sum_task(sums: ReasoningGymEnvironment, question: str, answer: str, terms: int = 0) -> Task:
    """A task with a question of our own."""
    task = sums.sample(Random(0), 0.0)
    spec = {**task.spec, "question": question, "answer": answer, "levels": {"num_terms": terms, "num_digits": 0}}
    return replace(task, spec=spec)


def test_there_are_as_many_families_as_counted() -> None:
    assert len(curricula()) == 102
    assert len(FAMILIES) == 98
    assert set(HARMLESS) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_tasks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    everybodys = random.getstate()
    environment = ReasoningGymEnvironment([family])
    if family in SECONDS:
        return
    for difficulty in (0.0,) if family in SLOW else (0.0, 0.5):
        task = environment.sample(Random(f"{family}/{difficulty}"), difficulty)
        assert environment.validate(task) is None
        assert (task.kind, task.version, task.root_id) == (family, 0, task.id)
        lasts = dict(last_levels(family))
        assert all(level < max(lasts[name], 1) for name, level in task.spec["levels"].items())  # the last ones are held out
        episode = environment.start(replace(task, spec=json.loads(json.dumps(task.spec))))
        assert task.spec["question"].rstrip() in episode.observation.text
        assert not episode.observation.commands
        expert = environment.expert(episode, Random(0))
        assert (expert is None) == (family in SEVERAL_ANSWERS)
        lost = environment.start(task).step("nobody knows")
        assert (lost.done, lost.outcome) == (True, LOST)
        if expert is not None:
            boxed = PaperPolicyFormat().parse(f"I think so.\n\\boxed{{{expert.action}}}", episode.observation)
            assert boxed is not None
            won = episode.step(boxed)
            assert (won.done, won.outcome, won.is_valid) == (True, WON, True)
    assert random.getstate() == everybodys


def test_the_policy_never_sees_the_answer(sums: ReasoningGymEnvironment) -> None:
    episode = sums.start(sum_task(sums, "3 + 444 =", "447"))
    assert "447" not in episode.observation.text
    transition = episode.step("447")
    assert "447" not in transition.observation.text
    assert sums.start(sum_task(sums, "3 + 444 =", "447")).step("446").observation == transition.observation  # nor a judge


def test_only_a_full_score_wins(sums: ReasoningGymEnvironment) -> None:
    """The library gives 3/5 to "447 ?" for containing "447"."""
    task = sum_task(sums, "3 + 444 =", "447")
    assert score("chain_sum", (("num_terms", 0), ("num_digits", 0)), sums.start(task).item, "447 ?") == pytest.approx(0.6)
    outcomes = {answer: sums.start(task).step(answer).outcome for answer in ("447 ?", "446", "447", "+447.0", "")}
    assert outcomes == {"447 ?": LOST, "446": LOST, "447": WON, "+447.0": WON, "": LOST}
    assert not sums.start(task).step("").is_valid


def test_a_scorer_that_fails_on_an_answer_is_a_loss() -> None:
    environment = ReasoningGymEnvironment(["prime_factorization"])  # reads int("two")
    assert environment.start(environment.sample(Random(0), 0.0)).step("two").outcome == LOST


@pytest.mark.parametrize("family", sorted(HARMLESS))
def test_an_answer_is_never_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These scorers call eval or sympy's parser on the answer."""
    ran: list[int] = []
    monkeypatch.setattr(sys, "setswitchinterval", ran.append)
    environment = ReasoningGymEnvironment([family])
    task = environment.sample(Random(0), 0.0)
    for answer in ("__import__('sys').setswitchinterval(1)", "9**9**9**9", "9*\n*9"):
        assert environment.start(task).step(answer).outcome == LOST
    assert not ran


def test_unusable_families_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError) as refused:
        ReasoningGymEnvironment(["chain_sums", "acre", "chain_sum", "game_of_life_halting", *HASH_DEPENDENT])
    message = str(refused.value)
    assert "'chain_sums' (unknown; near are chain_sum" in message
    assert "'acre' (has no levels)" in message
    assert "'game_of_life_halting' (every answer scores 1.0)" in message
    assert "'isomorphic_strings' (draws other items in every process: set PYTHONHASHSEED" in message
    assert "'chain_sum'" not in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"families": []}, "families is empty"),
        ({"families": ["chain_sum"], "max_level": -1}, "max_level must be from 0 to 40, got -1"),
        ({"families": ["knight_swap"], "max_level": 0}, "refuses all in_domain levels of knight_swap up to max_level 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReasoningGymEnvironment(**settings)  # type: ignore[arg-type]


def test_bad_difficulties_are_refused(sums: ReasoningGymEnvironment) -> None:
    with pytest.raises(ConfigError, match=r"difficulty must be from 0 to 1, got 1\.5"):
        sums.sample(Random(0), 1.5)


def test_the_missing_package_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"pip install 'rla_lightning\[reasoning-gym\]'"):
        ReasoningGymEnvironment(["chain_sum"])


def test_levels_that_the_library_refuses_are_raised() -> None:
    """knight_swap needs 6 nodes, which is level 1 of its curriculum."""
    environment = ReasoningGymEnvironment(["knight_swap"])
    assert dict(environment._draw_levels("knight_swap", Random(0), 0.0, "in_domain"))["nodes"] >= 1


def test_difficulty_is_the_share_of_the_levels(sums: ReasoningGymEnvironment) -> None:
    for wanted, total in ((0.0, 0), (0.5, 4), (1.0, 8)):  # two attributes, levels 0 to 4
        tasks = [sums.sample(Random(f"{wanted}/{seed}"), wanted) for seed in range(20)]
        assert {sum(task.spec["levels"].values()) for task in tasks} == {total}
        assert {task.difficulty for task in tasks} == {wanted}
    assert len({tuple(sums.sample(Random(seed), 0.5).spec["levels"].values()) for seed in range(40)}) > 2


def test_levels_show_in_the_question(sums: ReasoningGymEnvironment) -> None:
    task = sums.sample(Random(1), 1.0)  # level 4: 6 terms of 5 digits
    numbers = [word for word in task.spec["question"].split() if word.isdigit()]
    assert [len(number) for number in numbers] == [5] * 6
    assert sums.describe(task) == "chain_sum num_terms n4 num_digits n4"
    assert sums.knobs(task) == {"num_terms": 4.0, "num_digits": 4.0}


def test_out_of_distribution_is_one_or_two_levels_beyond(sums: ReasoningGymEnvironment) -> None:
    beyond = set()
    for seed in range(60):
        levels = sums.sample(Random(seed), seed / 60, "out_of_distribution").spec["levels"].values()
        assert sum(level > 4 for level in levels) == 1
        beyond.add(max(levels))
        assert max(sums.sample(Random(seed), seed / 60).spec["levels"].values()) <= 4
    assert beyond == {5, 6}


def test_families_are_mixed(tiny: ReasoningGymEnvironment) -> None:
    assert {tiny.sample(Random(seed), 0.2).kind for seed in range(40)} == set(TINY)


def test_ids_say_family_and_question(sums: ReasoningGymEnvironment) -> None:
    first, again, other = (sums.sample(Random(seed), 0.5) for seed in (3, 3, 4))
    assert first == again
    assert first.id != other.id
    moved = replace(first, id=other.id)
    assert sums.validate(moved) == "The id belongs to another question."


def test_equal_draws_give_equal_tasks_whatever_was_drawn_between(tiny: ReasoningGymEnvironment) -> None:
    tasks = [tiny.sample(Random(seed), 0.3) for seed in range(6)]
    other = pickle.loads(pickle.dumps(tiny))
    draw_item.cache_clear()
    assert [other.sample(Random(seed), 0.3) for seed in reversed(range(6))] == tasks[::-1]


@pytest.mark.parametrize("split", ["in_domain", "out_of_distribution"])
def test_few_items_are_told_as_few_tasks(split: str) -> None:
    """A probability for 3 coins is one of a handful of questions: equal ones have one id, so a data module can count them."""
    coins = ReasoningGymEnvironment(["coin_flip"], max_level=0)
    tasks = [coins.sample(Random(seed), 0.0, split) for seed in range(200)]  # type: ignore[arg-type]
    questions = {task.spec["question"] for task in tasks}
    assert len({task.id for task in tasks}) == len(questions) < 40


@pytest.mark.parametrize(("direction", "sign"), [("harder", 1), ("easier", -1)])
def test_rewrites_move_levels_the_asked_way(sums: ReasoningGymEnvironment, direction: str, sign: int) -> None:
    task = sums.sample(Random(5), 0.5)
    children = sums.vary(task, direction, Random(1), 12)  # type: ignore[arg-type]
    assert len({child.id for child in children}) == 12
    steps = set()
    for child in children:
        changes = [sign * (child.spec["levels"][name] - level) for name, level in task.spec["levels"].items()]
        assert min(changes) >= 0
        steps.add(sum(changes))
        assert (child.parent_id, child.root_id, child.version, child.kind) == (task.id, task.id, 1, task.kind)
        assert sums.validate(child, task) is None
        assert sign * (child.difficulty - task.difficulty) > 0
    assert steps == {1, 2, 3}


def test_there_is_nothing_beyond_the_ends(sums: ReasoningGymEnvironment) -> None:
    assert sums.vary(sums.sample(Random(0), 0.0), "easier", Random(0), 4) == ()
    assert sums.vary(sums.sample(Random(0), 1.0), "harder", Random(0), 4) == ()
    assert sums.vary(sums.sample(Random(0), 0.5, "out_of_distribution"), "easier", Random(0), 4) == ()


def test_redrawn_tasks_keep_their_levels(tiny: ReasoningGymEnvironment) -> None:
    for seed in range(6):
        task = tiny.sample(Random(seed), 0.4)
        redrawn = tiny.redraw(task, Random(seed))
        assert redrawn is not None
        assert (redrawn.kind, tiny.knobs(redrawn), redrawn.parent_id) == (task.kind, tiny.knobs(task), task.id)
        assert redrawn.spec["question"] != task.spec["question"]
        assert tiny.validate(redrawn, task) is None


def test_a_rewrite_has_to_differ(sums: ReasoningGymEnvironment) -> None:
    task = sums.sample(Random(0), 0.5)
    assert sums.validate(task, task) == "The task equals its parent."


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ({"num_terms": 11, "num_digits": 0}, "There are no levels {'num_terms': 11, 'num_digits': 0} of chain_sum."),
        ({"num_terms": 1}, "There are no levels {'num_terms': 1} of chain_sum."),
    ],
)
def test_unknown_levels_are_invalid(sums: ReasoningGymEnvironment, levels: dict[str, int], message: str) -> None:
    task = sums.sample(Random(0), 0.0)
    assert sums.validate(replace(task, spec={**task.spec, "levels": levels})) == message


def test_items_whose_answer_does_not_win_are_invalid(sums: ReasoningGymEnvironment) -> None:
    task = sums.sample(Random(0), 0.0)
    assert sums.validate(replace(task, spec={**task.spec, "answer": ""})) == "The answer '' of chain_sum does not win."


def test_another_environments_family_is_invalid(tiny: ReasoningGymEnvironment, sums: ReasoningGymEnvironment) -> None:
    task = next(task for seed in range(40) if (task := tiny.sample(Random(seed), 0.0)).kind == "spell_backward")
    assert sums.validate(task) == "The family 'spell_backward' is not among those of this environment."


def test_spelled_questions_lack_what_all_have() -> None:
    environment = ReasoningGymEnvironment(["chain_sum"], max_level=4, spelled=True)
    question = "State the final answer to the following arithmetic problem: 12 - 7 ="
    task = sum_task(environment, question, "-5")
    episode = environment.start(task)
    assert " ".join(episode.observation.digest) == "chain_sum 1 2 ␣ - ␣ 7"
    assert environment.expert(episode, Random(0)) == ExpertAction("- 5")
    assert episode.step("- 5").outcome == WON
    assert environment.start(task).step("- 4").outcome == LOST


def test_spelling_is_read_back() -> None:
    text = "a #1\n\t-b "
    assert " ".join(spell(text)) == "a ␣ ♯ 1 ↵ ⇥ - b ␣"
    assert read(" ".join(spell(text))) == text
    assert read("1 chain_sum 2") == "1chain_sum2"
    assert shared_frame(["add 12 and 3 now", "add 1 and 5 now"]) == ("add 1", " now")
    assert shared_frame(["same", "same"]) == ("same", "")


def test_all_words_are_in_the_vocabulary(tiny: ReasoningGymEnvironment) -> None:
    words = set(tiny.vocabulary())
    tokenizer, policy_format = environment_tokenizer(tiny.vocabulary()), CompactPolicyFormat()
    for seed in range(30):
        split = "out_of_distribution" if seed % 3 == 0 else "in_domain"
        episode = tiny.start(task := tiny.sample(Random(seed), seed / 30, split))  # type: ignore[arg-type]
        expert, detour = tiny.expert(episode, Random(0)), tiny.detour(episode, Random(seed))
        assert expert is not None
        assert detour is not None
        assert words.issuperset([*episode.observation.digest, *tiny.describe(task).split(), *expert.action.split()])
        assert words.issuperset(detour.split())
        ids = policy_format.answer(tokenizer, episode.observation, expert)
        text = tokenizer.decode(list(ids), skip_special_tokens=True)
        assert policy_format.parse(text, episode.observation) == expert.action


def test_detours_are_wrong_and_of_both_sorts(tiny: ReasoningGymEnvironment) -> None:
    task = next(task for seed in range(40) if (task := tiny.sample(Random(seed), 0.5)).kind == "spell_backward")
    right = str(task.spec["answer"])
    detours = {read(str(tiny.detour(tiny.start(task), Random(seed)))) for seed in range(40)}
    assert right not in detours
    slips = {d for d in detours if d[:1] == right[:1] or d[-1:] == right[-1:]}
    assert slips
    assert detours - slips
    assert all(tiny.start(task).step(" ".join(spell(detour))).outcome == LOST for detour in detours)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("447", StepLabel(1, "#right")),
        ("446", StepLabel(-1, "#other")),
        ("44", StepLabel(-1, "#shorter")),
        ("4477", StepLabel(-1, "#longer")),
        ("", StepLabel(-1, "#unreadable")),
    ],
)
def test_labels_say_why(sums: ReasoningGymEnvironment, answer: str, label: StepLabel) -> None:
    episode = sums.start(sum_task(sums, "3 + 444 =", "447"))
    assert sums.label_step(episode, answer) == label
    assert label.critique in sums.vocabulary()


def test_families_with_several_answers_have_no_expert() -> None:
    environment = ReasoningGymEnvironment(["graph_color"])
    episode = environment.start(environment.sample(Random(0), 0.0))
    assert environment.expert(episode, Random(0)) is None
    assert environment.detour(episode, Random(0)) is None
    assert environment.label_step(episode, "{}") == StepLabel(-1, "#other")


def test_the_observation_is_complete(sums: ReasoningGymEnvironment) -> None:
    observation = sums.start(sum_task(sums, "3 + 444 =", "447")).observation
    asked = "Your action is the answer alone, in the form that the question asks for."
    assert observation == Observation(f"3 + 444 =\n\n{asked}")


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("coin_flip", "1e999999999"),  # ten to that power
        ("coin_flip", "1/" + "9" * 5000),
        ("propositional_logic", "∨".join("abcdefghijklmnopqrstuvwxyz")),  # 2^26 assignments
        ("propositional_logic", "∨".join(f"P{'Q' * n}" for n in range(26))),
        ("spell_backward", "a" * 50_000),
    ],
)
def test_answers_that_would_take_for_ever_lose_at_once(family, answer):
    environment = ReasoningGymEnvironment([family])
    episode = environment.start(environment.sample(Random(0), 0.5))
    assert episode.step(answer).outcome == LOST


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_probabilities_of_coins_are_readable_at_every_level(difficulty):
    environment = ReasoningGymEnvironment(["coin_flip"])
    for index in range(30):
        task = environment.sample(Random(index), difficulty)
        assert environment.validate(task) is None
        expert = environment.expert(environment.start(task), Random(0))
        assert environment.start(task).step(expert.action).outcome == WON
