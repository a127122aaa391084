"""AlfWorld as an environment: its corpora, what is skipped and said, difficulties, expert, labels."""

import json
import logging
import os
import pickle
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from rla_lightning.environments.alfred.scene import GOAL_KINDS
from rla_lightning.environments.alfred.vocabulary import alfred_vocabulary
from rla_lightning.environments.alfworld import AlfWorldEnvironment
from rla_lightning.environments.alfworld import environment as module
from rla_lightning.environments.alfworld.builder import build_games
from rla_lightning.environments.alfworld.environment import LocalGames
from rla_lightning.environments.base import Episode
from rla_lightning.types import LOST, WON, ConfigError, ExpertAction, StepLabel

PARTS = (
    ("train", "in_domain"), ("validation", "in_domain"), ("validation", "out_of_distribution"), ("test", "in_domain"),
    ("test", "out_of_distribution"),
)  # fmt: skip
LOGGER = "rla_lightning.environments.alfworld.environment"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("games") / "built"
    build_games(folder, 96, seed=1, size="small", evaluation_games=12, sliced_share=0.2)
    return folder


@pytest.fixture(scope="module")
def environment(built) -> AlfWorldEnvironment:
    return AlfWorldEnvironment(str(built))


def scene_of(path: str) -> str:
    return path.split("/")[1].rpartition("-")[2]


# Corpora


def test_every_game_has_one_purpose(environment, built):
    games = {part: [task.spec["game"] for task in environment.corpus(*part)] for part in PARTS}
    files = sorted(path.relative_to(built / "json_2.1.1").as_posix() for path in built.rglob("game.tw-pddl"))
    assert sorted(name for names in games.values() for name in names) == files
    assert len(games["test", "in_domain"]) == len(games["test", "out_of_distribution"]) == 12
    assert {name.split("/")[0] for name in games["test", "in_domain"]} == {"valid_seen"}
    assert {name.split("/")[0] for name in games["test", "out_of_distribution"]} == {"valid_unseen"}
    assert environment.corpus("train", "out_of_distribution") == ()
    rooms = {part: {scene_of(name) for name in games[part]} for part in PARTS}
    assert not rooms["validation", "out_of_distribution"] & (rooms["train", "in_domain"] | rooms["validation", "in_domain"])
    assert len({task.id for part in PARTS for task in environment.corpus(*part)}) == len(files)


def test_tasks_are_plain_data_and_found_again(environment, built):
    again = AlfWorldEnvironment(str(built))
    for part in PARTS:
        tasks = environment.corpus(*part)
        assert again.corpus(*part) == tasks
        assert [task.spec["game"] for task in tasks] == sorted(task.spec["game"] for task in tasks)
        for task in tasks:
            assert json.loads(json.dumps(task.spec)) == task.spec
            limit = 40 if part[0] == "train" else 60
            assert task.spec == {"game": task.spec["game"], "purpose": part[0], "max_turns": limit}
            assert (task.root_id, task.parent_id, task.version, task.environment) == (task.id, None, 0, "alfworld")
            assert f"/{task.kind}-" in task.spec["game"]
            assert 0 < task.difficulty <= 1
            assert environment.start(task).max_turns == limit


def test_corpora_do_not_depend_on_where_files_lie_and_how_they_are_listed(environment, built, tmp_path, monkeypatch):
    shutil.copytree(built / "json_2.1.1", tmp_path / "elsewhere")  # without the folder json_2.1.1
    walk = os.walk

    def walk_backwards(top):
        return reversed([(folder, folders, files[::-1]) for folder, folders, files in walk(top)])

    monkeypatch.setattr(os, "walk", walk_backwards)
    moved = AlfWorldEnvironment(str(tmp_path / "elsewhere"))
    assert [moved.corpus(*part) for part in PARTS] == [environment.corpus(*part) for part in PARTS]


def test_kinds_can_be_chosen(built):
    chosen = AlfWorldEnvironment(str(built), kinds=["look_at_obj_in_light", "pick_two_obj_and_place"])
    for part in (("train", "in_domain"), ("test", "in_domain"), ("test", "out_of_distribution")):
        assert {task.kind for task in chosen.corpus(*part)} == {"look_at_obj_in_light", "pick_two_obj_and_place"}


def test_what_is_skipped_is_counted_with_its_reason(built, tmp_path, caplog):
    root = tmp_path / "data"
    shutil.copytree(built / "json_2.1.1", root)
    games = sorted(
        path.relative_to(root).as_posix()
        for path in (root / "valid_seen").rglob("game.tw-pddl")
        if path.parent.parent.name.split("-")[0] == "pick_and_place_simple"
    )
    others = sorted(path.relative_to(root).as_posix() for path in (root / "valid_seen").rglob("game.tw-pddl"))
    others = [name for name in others if name not in games]

    def change(name: str, **changes: object) -> None:
        data = json.loads((root / name).read_text())
        (root / name).write_text(json.dumps({**data, **changes}))

    (root / others[0]).write_text("{")
    change(others[1], solvable=False)
    change(others[2], solvable=False)
    change(others[3], pddl_problem=None)
    change(others[4], grammar='"Your task is to: put it there." in other words')
    problem = json.loads((root / others[5]).read_text())["pddl_problem"]
    change(others[5], pddl_problem=re.sub(r"\(receptacletype \w+ \w+\)", "", problem))
    for name in ("pick_and_place_with_movable_recep-Apple-Bowl-Desk-8/trial_1", "dance-Apple-None-Desk-8/trial_1"):
        (root / "valid_seen" / name).mkdir(parents=True)
        (root / "valid_seen" / name / "game.tw-pddl").write_text("{}")
    with caplog.at_level(logging.WARNING, LOGGER):
        environment = AlfWorldEnvironment(str(root))
        tasks = environment.corpus("test", "in_domain")
        environment.corpus("test", "in_domain")
        environment.corpus("test", "out_of_distribution")
    first, second = caplog.messages  # said once, and nothing about the folder that is whole
    assert first.startswith(f"alfworld: skipped in {root}: ")
    assert set(first.removeprefix(f"alfworld: skipped in {root}: ").split("; ")) == {
        "movable receptacles are not supported (1)",
        "an unknown kind of task (1)",
    }
    assert second.startswith("alfworld: skipped 6 of 12 games for test: unsolvable (2); ")
    assert set(second.removeprefix("alfworld: skipped 6 of 12 games for test: ").split("; ")) == {
        "unsolvable (2)",
        "game.tw-pddl is not JSON (1)",
        "pddl_domain, grammar or pddl_problem is missing (1)",
        "the texts of another AlfWorld version: use backend textworld (1)",
        "no plan reaches the goal (1)",
    }
    assert sorted(task.spec["game"] for task in tasks) == sorted({*games, *others} - set(others[:6]))


def test_the_engine_takes_games_with_other_texts(built, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TextWorldEngine", lambda workers: ("engine", workers))
    root = tmp_path / "data"
    shutil.copytree(built / "json_2.1.1" / "valid_seen", root / "valid_seen")
    for path in root.rglob("game.tw-pddl"):
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "grammar": '"Your task is to: put it there." in other words'}))
    with pytest.raises(ConfigError, match="valid_seen has no playable games for test in_domain"):
        AlfWorldEnvironment(str(root)).corpus("test", "in_domain")
    real = AlfWorldEnvironment(str(root), backend="textworld", workers=3)
    assert real.engine == ("engine", 3)
    assert len(real.corpus("test", "in_domain")) == 12


def test_folders_without_games_are_named(built, tmp_path):
    with pytest.raises(ConfigError, match=r"/missing' has none of the folders .*rla games .*/missing --number 256"):
        AlfWorldEnvironment(str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"/empty' has none of the folders train, valid_seen, valid_unseen"):
        AlfWorldEnvironment(str(tmp_path / "empty"))
    (tmp_path / "bare" / "train").mkdir(parents=True)
    bare = AlfWorldEnvironment(str(tmp_path / "bare"))
    for part, folder in ((("train", "in_domain"), "train"), (("test", "out_of_distribution"), "valid_unseen")):
        with pytest.raises(ConfigError, match=f"bare/{folder} has no playable games for {part[0]} {part[1]}"):
            bare.corpus(*part)


def test_games_are_built_where_there_are_none(tmp_path, caplog):
    local = LocalGames(number=6, evaluation_games=2, seed=9, size="small")
    with caplog.at_level(logging.WARNING, LOGGER):
        first = AlfWorldEnvironment(str(tmp_path / "games"), local)
    assert caplog.messages == [f"alfworld: building 6 games of seed 9 in {tmp_path / 'games'}"]
    assert len(first.folder.games["train"]) == 6
    assert len(first.corpus("test", "in_domain")) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    AlfWorldEnvironment(str(tmp_path / "games"), replace(local, number=7))  # what is there stays
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": []}, "alfworld: kinds is empty"),
        ({"kinds": ["put"]}, "alfworld: unknown kind 'put'; known are pick_and_place_simple, look_at"),
        ({"max_turns": 0}, "alfworld: max_turns must be at least 1, got 0"),
        ({"eval_max_turns": -1}, "alfworld: eval_max_turns must be at least 1, got -1"),
        ({"workers": 0}, "alfworld: workers must be at least 1, got 0"),
        ({"backend": "slow"}, "alfworld: backend must be fast or textworld, got 'slow'"),
        ({"changes": ["goal", "walls"]}, "alfworld: unknown change 'walls'; known are goal, distractors, hiding"),
    ],
)
def test_arguments_that_cannot_work(built, arguments, message):
    with pytest.raises(ConfigError, match=message):
        AlfWorldEnvironment(str(built), **arguments)


def test_no_games_cannot_be_built():
    with pytest.raises(ConfigError, match=r"alfworld: build\.number must be at least 1, got 0"):
        LocalGames(number=0)


# Tasks


def test_samples_are_near_the_difficulty_and_of_the_split(environment):
    rng = Random(0)
    means = {}
    for split, purpose in (("in_domain", "train"), ("out_of_distribution", "validation")):
        pool = {task.id: task for task in environment.corpus(purpose, split)}
        for difficulty in (0.0, 1.0):
            drawn = [environment.sample(rng, difficulty, split) for _ in range(40)]
            assert all(pool[task.id] == task for task in drawn)
            means[split, difficulty] = sum(task.difficulty for task in drawn) / len(drawn)
    assert means["in_domain", 0.0] + 0.2 < means["in_domain", 1.0]
    assert environment.sample(Random(5), 0.5) == environment.sample(Random(5), 0.5)
    for difficulty in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=f"alfworld: difficulty must be from 0 to 1, got {difficulty}"):
            environment.sample(rng, difficulty)


def test_descriptions_count_what_makes_a_game_hard(environment):
    words = set(environment.vocabulary())
    assert environment.vocabulary() == alfred_vocabulary()
    for part in PARTS:
        for task in environment.corpus(*part):
            said = environment.describe(task).split()
            assert set(said) <= words
            cut = ["sliced"] if "Sliced" in task.spec["game"] else []
            _, item, _, target, _ = task.spec["game"].split("/")[1].split("-")
            assert said[1:-10] == [*cut, item.removesuffix("Sliced").lower(), target.lower()]
            assert said[-10::2] == ["receptacles", "distractors", "closed", "hidden", "copies"]
            first = environment.start(task).observation.text.splitlines()[2]  # ... you see a bed 1, a desk 1, and ...
            assert said[-9] == f"n{first.partition('you see')[2].count(' a ')}"


def test_environments_and_tasks_travel_to_other_processes(environment):
    task = environment.corpus("train", "in_domain")[0]
    other, same = pickle.loads(pickle.dumps((environment, task)))
    assert other.start(same).observation == environment.start(task).observation


def test_episodes_do_not_share_their_world(environment):
    task = environment.corpus("train", "in_domain")[0]
    before = environment.start(task).observation
    episode = environment.start(task)
    for _ in range(30):
        if episode.is_done:
            break
        episode.step(Random(len(episode.observation.text)).choice(episode.observation.commands))
    assert environment.start(task).observation == before


# Expert and labels


def test_the_expert_wins_within_the_limit(environment):
    outcomes = Counter()
    for task in environment.corpus("train", "in_domain"):
        episode, rng, outcome = environment.start(task), Random(task.id), LOST
        for _ in range(episode.max_turns):
            advice = environment.expert(episode, rng)
            assert advice.action in episode.observation.commands
            transition = episode.step(advice.action)
            if transition.done:
                outcome = transition.outcome
                break
        outcomes[task.kind, outcome] += 1
    assert {kind for kind, _ in outcomes} == set(GOAL_KINDS)
    won = sum(number for (_, outcome), number in outcomes.items() if outcome == WON)
    assert won >= 0.95 * outcomes.total()


def test_steps_are_labelled(environment):
    for task in environment.corpus("train", "in_domain")[::9]:
        episode, rng = environment.start(task), Random(0)
        assert environment.label_step(episode, "dance") == StepLabel(-1, "#invalid")
        assert environment.label_step(episode, "") == StepLabel(-1, "#invalid")
        assert environment.label_step(episode, "look") == StepLabel(-1, "#idle")
        for _ in range(episode.max_turns):
            distance = episode.distance()
            advice = environment.expert(episode, rng)
            assert isinstance(advice, ExpertAction)
            said = environment.label_step(episode, advice.action)
            assert said.critique in ("#progress", "#explore", "#wander")
            if episode.step(advice.action).done:
                break
            assert (episode.distance() < distance) is (said.critique == "#progress")


class OtherEpisode(Episode):
    """As the engine's: texts and commands only."""

    def step(self, action):
        raise NotImplementedError


def test_there_is_no_expert_and_no_label_without_the_simulator(environment):
    episode = OtherEpisode()
    assert environment.expert(episode, Random(0)) is None
    assert environment.label_step(episode, "look") is None
