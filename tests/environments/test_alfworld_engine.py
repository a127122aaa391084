"""Our simulator against TextWorld, command for command: texts, admissible commands and their order, won, score."""

import gc
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from rla_lightning.environments.alfred.planner import plan
from rla_lightning.environments.alfred.scene import Goal
from rla_lightning.environments.alfworld import AlfWorldEnvironment
from rla_lightning.environments.alfworld.builder import build_games
from rla_lightning.environments.alfworld.engine import EngineError, TextWorldEngine
from rla_lightning.environments.alfworld.games import GAME_FILE, engine_texts, game_of, with_instruction, write_json
from rla_lightning.environments.alfworld.pddl import CONSTANTS, Problem, render_problem
from rla_lightning.types import WON, ConfigError, Task

pytestmark = pytest.mark.usefixtures("needs_engine")

NONSENSE = (
    "", " ", "go", "go to", "go to cabinet 99", "look around", "LOOK", " inventory ", "take apple 1", "open everything",
    "examine", "help me", "go  to  countertop 1", "take", "0", "¿qué?",
)  # fmt: skip


def compare(
    fast: AlfWorldEnvironment, real: AlfWorldEnvironment, tasks: Sequence[Task], steps: int, seed: str = "compare"
) -> list[str]:
    """Plays every task in both backends with the same commands; says what differs.

    Seven in ten commands are admissible ones (every other of them no walk, so that much happens), two were admissible
    earlier, one is nonsense; a shortest plan to the goal ends the game.
    """
    ours, theirs = [fast.start(task) for task in tasks], [real.start(task) for task in tasks]
    rngs = [Random(f"{seed}/{task.id}") for task in tasks]
    seen: list[dict[str, None]] = [{} for _ in tasks]
    differences = [
        f"{task.id} at the start: {mine.observation.text!r} != {other.observation.text!r}"
        for task, mine, other in zip(tasks, ours, theirs, strict=True)
        if (mine.observation.text, mine.observation.commands) != (other.observation.text, other.observation.commands)
    ]
    ending: list[list[str] | None] = [None] * len(tasks)
    playing = list(range(len(tasks)))
    for turn in range(10 * steps):
        commands = []
        for i in playing:
            if turn >= steps and ending[i] is None:
                actions = plan(ours[i].goal, ours[i].world) or []
                ending[i] = _commands(ours[i], actions)
            commands.append(ending[i].pop(0) if ending[i] else _draw(rngs[i], ours[i].observation.commands, seen[i]))
        answers = real.step_all([theirs[i] for i in playing], commands)
        left = []
        for i, command, answer in zip(playing, commands, answers, strict=True):
            mine = ours[i].step(command)
            if isinstance(answer, Exception):
                raise answer
            for name, a, b in (
                ("text", mine.observation.text, answer.observation.text),
                ("commands", mine.observation.commands, answer.observation.commands),
                ("won", (mine.done, mine.outcome, int(mine.done)), (answer.done, answer.outcome, theirs[i].reply.score)),
                ("valid", mine.is_valid, answer.is_valid),
            ):
                if a != b:
                    differences.append(f"{tasks[i].id} turn {turn} {command!r} {name}: {a!r} != {b!r}")
            if not mine.done and turn < steps + 100:
                left.append(i)
            elif turn >= steps and not mine.done:
                differences.append(f"{tasks[i].id}: its plan does not win")
        playing = left
        if not playing:
            break
    return differences


def _draw(rng: Random, commands: Sequence[str], seen: dict[str, None]) -> str:
    earlier = [command for command in seen if command not in commands]
    seen.update(dict.fromkeys(commands))
    share = rng.random()
    if share < 0.1:
        return rng.choice(NONSENSE)
    if share < 0.3 and earlier:
        return rng.choice(earlier)
    acting = [command for command in commands if not command.startswith(("go to", "help", "inventory"))]
    return rng.choice(acting if acting and rng.random() < 0.5 else commands)


def _commands(episode, actions) -> list[str]:
    """The commands of a plan; names do not change on the way."""
    forms = {
        "go": "go to {r}", "open": "open {r}", "take": "take {o} from {r}", "move": "move {o} to {r}", "use": "use {o}",
        "heat": "heat {o} with {r}", "cool": "cool {o} with {r}", "clean": "clean {o} with {r}", "slice": "slice {o} with {r}",
    }  # fmt: skip
    return [forms[verb].format(o=item, r=place) for verb, item, place in actions]


MESSY_OBJECTS = {
    "agent1": "agent",
    **{f"loc_bar_{i}": "location" for i in range(5)},
    **{f"{kind}type": "rtype" for kind in ("countertop", "drawer", "cabinet", "shelf")},
    **{f"{kind}type": "otype" for kind in ("apple", "desklamp", "plate", "painting", "spoon")},
    "countertop_bar_1": "receptacle", "drawer_bar_1": "receptacle", "cabinet_bar_minus_1_dot_5": "receptacle",
    "shelf_bar_1": "receptacle", "sink_bar_1_bar_sinkbasin": "receptacle", "fridge_bar_1": "receptacle",
    "microwave_bar_1": "receptacle",
    **{f"apple_bar_{i:02d}": "object" for i in range(1, 12)},
    "desklamp_bar_1": "object", "plate_bar_1": "object", "painting_bar_1": "object", "spoon_bar_1": "object",
    "knife_bar_1": "object", "butterknife_bar_1": "object",
    **CONSTANTS,
}  # fmt: skip
MESSY_FACTS = """
    atlocation agent1 loc_bar_1
    receptacletype countertop_bar_1 countertoptype; receptacleatlocation countertop_bar_1 loc_bar_1
    receptacletype drawer_bar_1 drawertype; receptacleatlocation drawer_bar_1 loc_bar_1; openable drawer_bar_1
    receptacletype cabinet_bar_minus_1_dot_5 cabinettype; receptacleatlocation cabinet_bar_minus_1_dot_5 loc_bar_2
    openable cabinet_bar_minus_1_dot_5; opened cabinet_bar_minus_1_dot_5
    receptacletype shelf_bar_1 shelftype; receptacleatlocation shelf_bar_1 loc_bar_2
    receptacletype sink_bar_1_bar_sinkbasin sinkbasintype; receptacleatlocation sink_bar_1_bar_sinkbasin loc_bar_3
    receptacletype fridge_bar_1 fridgetype; receptacleatlocation fridge_bar_1 loc_bar_3; openable fridge_bar_1
    receptacletype microwave_bar_1 microwavetype; receptacleatlocation microwave_bar_1 loc_bar_4; openable microwave_bar_1
    cancontain countertoptype appletype; cancontain countertoptype platetype; cancontain countertoptype knifetype
    cancontain countertoptype spoontype; cancontain drawertype spoontype; cancontain drawertype knifetype
    cancontain drawertype butterknifetype; cancontain cabinettype platetype; cancontain cabinettype spoontype
    cancontain shelftype platetype; cancontain shelftype butterknifetype; cancontain sinkbasintype appletype
    cancontain sinkbasintype platetype; cancontain fridgetype appletype; cancontain fridgetype platetype
    cancontain microwavetype appletype; cancontain microwavetype platetype; cancontain shelftype spoontype
    objecttype desklamp_bar_1 desklamptype; toggleable desklamp_bar_1; inreceptacle desklamp_bar_1 drawer_bar_1
    ison desklamp_bar_1; objectatlocation desklamp_bar_1 loc_bar_4
    objecttype plate_bar_1 platetype; pickupable plate_bar_1; cleanable plate_bar_1; heatable plate_bar_1; coolable plate_bar_1
    isreceptacleobject plate_bar_1; inreceptacle plate_bar_1 countertop_bar_1; objectatlocation plate_bar_1 loc_bar_1
    inreceptacleobject spoon_bar_1 plate_bar_1
    objecttype spoon_bar_1 spoontype; pickupable spoon_bar_1; cleanable spoon_bar_1; inreceptacle spoon_bar_1 countertop_bar_1
    inreceptacle spoon_bar_1 shelf_bar_1; objectatlocation spoon_bar_1 loc_bar_2; isclean spoon_bar_1
    objecttype painting_bar_1 paintingtype; inreceptacle painting_bar_1 shelf_bar_1; objectatlocation painting_bar_1 loc_bar_2
    objecttype knife_bar_1 knifetype; pickupable knife_bar_1; cleanable knife_bar_1; inreceptacle knife_bar_1 countertop_bar_1
    objectatlocation knife_bar_1 loc_bar_1
    objecttype butterknife_bar_1 butterknifetype; pickupable butterknife_bar_1; inreceptacle butterknife_bar_1 shelf_bar_1
    objectatlocation butterknife_bar_1 loc_bar_0
"""


def messy_problem() -> Problem:
    """What AlfWorld's own games have and built ones have not: an agent that starts at receptacles, several of them at one
    location, an object in two, a lamp in a drawer, objects whose location is not their receptacle's, states at the start."""
    facts = {tuple(fact.split()) for line in MESSY_FACTS.splitlines() for fact in line.split(";") if fact.strip()}
    for number in range(1, 12):
        name, place = f"apple_bar_{number:02d}", ("fridge_bar_1", "countertop_bar_1", "sink_bar_1_bar_sinkbasin")[number % 3]
        facts |= {("objecttype", name, "appletype"), ("pickupable", name), ("inreceptacle", name, place)}
        facts |= {(ability, name) for ability in ("heatable", "coolable", "cleanable", "sliceable")}
        facts.add(("objectatlocation", name, f"loc_bar_{number % 4}"))
    facts |= {("ishot", "apple_bar_03"), ("iscool", "apple_bar_04"), ("issliced", "apple_bar_05"), ("isclean", "apple_bar_06")}
    return Problem(MESSY_OBJECTS, frozenset(facts), Goal("pick_heat_then_place_in_recep", "apple", "microwave", sliced=True))


def write_messy(folder: Path) -> None:
    domain, grammar = engine_texts()
    goals = {
        "pick_heat_then_place_in_recep": Goal("pick_heat_then_place_in_recep", "apple", "microwave", sliced=True),
        "look_at_obj_in_light": Goal("look_at_obj_in_light", "plate", "desklamp"),
        "pick_two_obj_and_place": Goal("pick_two_obj_and_place", "apple", "microwave"),
        "pick_clean_then_place_in_recep": Goal("pick_clean_then_place_in_recep", "plate", "shelf"),
    }
    for kind, goal in goals.items():
        data = {
            "pddl_domain": domain,
            "grammar": with_instruction(grammar, "put the 3 hot things (all of them) away"),
            "pddl_problem": render_problem(replace(messy_problem(), goal=goal)),
            "solvable": True,
        }
        write_json(folder / "train" / f"{kind}-Apple-None-Messy-7" / "trial_0" / GAME_FILE, data)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games") / "built"
    build_games(folder, 48, seed=5, evaluation_games=6, sliced_share=0.5)
    return folder


@pytest.fixture(scope="module")
def real(built: Path):
    environment = AlfWorldEnvironment(str(built), backend="textworld")
    yield environment
    environment.engine.close()


def test_both_backends_say_the_same(built: Path, real: AlfWorldEnvironment):
    fast = AlfWorldEnvironment(str(built))
    tasks = fast.corpus("test", "in_domain") + fast.corpus("test", "out_of_distribution")
    assert len({task.kind for task in tasks}) == 6
    assert compare(fast, real, tasks, steps=25) == []


def test_both_backends_agree_on_messy_games(tmp_path: Path):
    write_messy(tmp_path)
    fast, real = AlfWorldEnvironment(str(tmp_path)), AlfWorldEnvironment(str(tmp_path), backend="textworld")
    assert compare(fast, real, _all_train(fast), steps=60) == []
    real.engine.close()


def _all_train(environment: AlfWorldEnvironment) -> list[Task]:
    return [
        Task(entry.path, "alfworld", {"game": entry.path, "purpose": "train", "max_turns": 400}, 0.5, entry.path, kind=entry.kind)
        for entry in environment.folder.games["train"]
    ]


def test_both_backends_agree_on_rewritten_games(built: Path, real: AlfWorldEnvironment):
    fast = AlfWorldEnvironment(str(built))
    children = []
    for index, task in enumerate(fast.corpus("train", "in_domain")[:12]):
        for direction in ("harder", "easier"):
            children += fast.vary(task, direction, Random(f"{index}/{direction}"), 1)
    assert len(children) >= 8
    assert {name for child in children for name in child.spec["edits"]} == {"goal", "added", "moved", "removed"}
    assert compare(fast, real, children[:8], steps=12) == []


def test_walkthroughs_win_in_the_engine(built: Path, real: AlfWorldEnvironment):
    fast = AlfWorldEnvironment(str(built))
    tasks = fast.corpus("test", "out_of_distribution")
    episodes = [real.start(task) for task in tasks]
    left = [list(fast._game(task.spec).walkthrough) for task in tasks]
    for _ in range(max(map(len, left))):
        playing = [i for i, commands in enumerate(left) if commands]
        answers = real.step_all([episodes[i] for i in playing], [left[i].pop(0) for i in playing])
        for i, answer in zip(playing, answers, strict=True):
            assert answer.is_valid
            assert (answer.done, answer.outcome) == ((True, WON) if not left[i] else (False, None))


def test_alfworlds_own_environment_plays_built_games(built: Path, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "argv", ["test"])
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    folder = built / "json_2.1.1" / "valid_seen"
    config = {
        "env": {
            "goal_desc_human_anns_prob": 0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "dataset": {"eval_id_data_path": str(folder), "num_eval_games": -1},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }
    environment = AlfredTWEnv(config, train_eval="eval_in_distribution")
    fast = AlfWorldEnvironment(str(built))
    whole = [task for task in fast.corpus("test", "in_domain") if "Sliced" not in task.spec["game"]]
    assert environment.num_games == len(whole)  # it leaves sliced ones out, as with its own data
    played = environment.init_env(batch_size=1)
    _, infos = played.reset()
    name = Path(infos["extra.gamefile"][0]).relative_to(built / "json_2.1.1").as_posix()
    walkthrough = fast._game({"game": name}).walkthrough
    for command in walkthrough:
        _, scores, dones, infos = played.step([command])
    assert (scores[0], dones[0], infos["won"][0]) == (1, True, True)
    played.close()


def test_an_error_of_the_engine_ends_one_episode_alone(real: AlfWorldEnvironment):
    task = real.corpus("test", "in_domain")[0]
    broken = real.engine.start({"pddl_domain": "(", "grammar": "", "pddl_problem": "("}, 10)
    with pytest.raises(EngineError):
        _ = broken.observation
    episode = real.start(task)
    assert episode.step("look").is_valid


def test_a_worker_that_died_is_reported_and_episodes_are_dropped(built: Path):
    environment = AlfWorldEnvironment(str(built), backend="textworld", workers=1)
    task = environment.corpus("test", "in_domain")[0]
    episode = environment.start(task)
    assert pickle.loads(pickle.dumps(environment)).engine.number == 1
    assert "look" in episode.observation.commands
    environment.engine._workers[0]._process.kill()
    with pytest.raises(EngineError, match="exit code -9"):
        episode.step("look")
    del episode
    gc.collect()
    environment.engine.close()


def test_without_the_packages_the_backend_is_refused(monkeypatch):
    monkeypatch.setattr("rla_lightning.environments.alfworld.engine.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="rla_lightning\\[alfworld\\]"):
        TextWorldEngine()


def test_names_are_alfworlds(monkeypatch):
    import sys

    monkeypatch.setattr(sys, "argv", ["test"])
    from alfworld.agents.utils.misc import Demangler
    from textworld.generator.game import EntityInfo

    problem = messy_problem()
    entities = {argument for fact in problem.facts for argument in fact[1:]}
    theirs = Demangler(game_infos={name: EntityInfo(name, "x") for name in entities})
    assert game_of(problem, "x").names == {
        name: theirs.demangle_alfred_name(name) for name in entities if problem.objects.get(name) in ("object", "receptacle")
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_games_of_two_hundred_steps(tmp_path: Path):
    build_games(tmp_path / "many", 102, seed=11, sliced_share=0.3)
    fast, real = AlfWorldEnvironment(str(tmp_path / "many")), AlfWorldEnvironment(str(tmp_path / "many"), backend="textworld")
    tasks = _all_train(fast)
    assert len(tasks) >= 100
    differences = []
    for first in range(0, len(tasks), 34):
        differences += compare(fast, real, tasks[first : first + 34], steps=200)
    real.engine.close()
    assert differences == []
