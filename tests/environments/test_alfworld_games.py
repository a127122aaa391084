"""Game files: the planning problem inside, the scene that it stands for, and folders of games."""

import json
from pathlib import Path
from random import Random

import pytest

from rla_lightning.environments.alfred.scene import GOAL_KINDS, Goal, Receptacle, Thing
from rla_lightning.environments.alfworld.games import (
    DIALECTS,
    GameEntry,
    engine_texts,
    fingerprint,
    game_of,
    index_games,
    instruction_of,
    names_of,
    read_engine_texts,
    read_game,
    with_instruction,
    write_json,
)
from rla_lightning.environments.alfworld.pddl import GameError, Problem, parse_problem, render_goal, render_problem
from rla_lightning.types import ConfigError

PROBLEM = """
(define (problem plan_trial_T1) ; a comment (with brackets
  (:domain alfred)
  (:objects
    agent1 - agent
    loc_bar_0 loc_bar_1 - location
    loc_bar_2 - location
    Mug_bar_1 Mug_bar_2 Lamp_bar_1 - object
    Desk_bar_1 Drawer_bar_1 Sink_bar_1_bar_SinkBasin Shelf_bar_9 - receptacle
    MugType DeskLampType - otype  DeskType DrawerType SinkBasinType - rtype
  )
  (:init
    (= (total-cost) 0)
    (= (distance loc_bar_0 loc_bar_1) 4)
    (atLocation agent1 loc_bar_1)
    (receptacleAtLocation Desk_bar_1 loc_bar_1) (receptacleType Desk_bar_1 DeskType)
    (receptacleAtLocation Drawer_bar_1 loc_bar_1) (receptacleType Drawer_bar_1 DrawerType) (openable Drawer_bar_1)
    (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_2) (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
    (opened Drawer_bar_1)
    (canContain DeskType MugType) (canContain DrawerType MugType)
    (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1) (heatable Mug_bar_1) (isReceptacleObject Mug_bar_1)
    (inReceptacle Mug_bar_1 Desk_bar_1) (inReceptacle Mug_bar_1 Drawer_bar_1) (objectAtLocation Mug_bar_1 loc_bar_2)
    (objectType Mug_bar_2 MugType) (pickupable Mug_bar_2) (isHot Mug_bar_2) (inReceptacle Mug_bar_2 Desk_bar_1)
    (inReceptacleObject Lamp_bar_1 Mug_bar_1)
    (objectType Lamp_bar_1 DeskLampType) (toggleable Lamp_bar_1) (isOn Lamp_bar_1) (inReceptacle Lamp_bar_1 Drawer_bar_1)
  )
  (:goal (and (exists (?r - receptacle) (exists (?o - object) (and
     (inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r DeskType))))))
  (:metric minimize (total-cost))
)
"""
PUT = "put a mug in desk"


def goal_text(kind: str, states: str = "", sliced: bool = False) -> str:
    """A goal written in AlfWorld's nested way."""
    cut = "(sliceable {0}) (isSliced {0}) "
    one = cut.format("?x") if sliced else ""
    if kind == "light":
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot DeskLampType)"
            " (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
            f" (exists (?x - object ?a - agent) (and {one}(objectType ?x MugType) (holds ?a ?x))))"
        )
    if kind == "two":
        first, second = (cut.format(name) if sliced else "" for name in ("?m", "?b"))
        return (
            f"(and (exists (?r - receptacle) (exists (?m - object) (and {first}(objectType ?m MugType)"
            " (receptacleType ?r DeskType) (inReceptacle ?m ?r) (exists (?b - object) (and (not (= ?m ?b))"
            f" {second}(objectType ?b MugType) (receptacleType ?r DeskType) (inReceptacle ?b ?r)))))))"
        )
    return (
        f"(and (exists (?r - receptacle) (exists (?x - object ?unused - object) (and {one}{states}"
        "(objectType ?x MugType) (receptacleType ?r DeskType) (inReceptacle ?x ?r)))))"
    )


def with_goal(goal: str) -> str:
    return f"(define (problem p) (:domain alfred) (:objects agent1 - agent) (:init) (:goal {goal}))"


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(
    ("kind", "word", "states"),
    [
        ("pick_and_place_simple", "put", ""),
        ("pick_clean_then_place_in_recep", "clean", "(cleanable ?x) (isClean ?x)"),
        ("pick_heat_then_place_in_recep", "heat", "(isHot ?x) (heatable ?x)"),
        ("pick_cool_then_place_in_recep", "cool", "(coolable ?x) (isCool ?x)"),
        ("pick_two_obj_and_place", "two", ""),
        ("look_at_obj_in_light", "light", ""),
    ],
)
def test_goals_of_every_kind_are_read_and_written(kind, word, states, sliced):
    goal = Goal(kind, "mug", "desklamp" if word == "light" else "desk", sliced)
    assert parse_problem(with_goal(goal_text(word, states, sliced))).goal == goal
    written = render_goal(goal)
    assert parse_problem(with_goal(written.removeprefix("(:goal ").removesuffix(")"))).goal == goal


@pytest.mark.parametrize(
    ("goal", "reason"),
    [
        ("(and)", "names no type of object"),
        ("()", "not an expression"),
        ("mug", "not an expression"),
        ("(forall (?o - object) (isClean ?o))", "uses 'forall'"),
        ("(not (isClean mug_bar_1))", "uses 'not'"),
        ("(exists (?o - object) (and (objectType ?o MugType) (isOn ?o)))", "uses 'ison'"),
        ("(exists (?o - object) (objectType ?o))", "'objecttype' does not have the arguments"),
        ("(exists (?o - object) (objectType ?o MugType))", "unknown kind"),
        (goal_text("put", "(isHot ?x)"), "unknown kind"),  # without heatable it means something else
        (goal_text("put", "(isHot ?x) (heatable ?x) (isClean ?x) (cleanable ?x)"), "unknown kind"),
        (goal_text("put").replace("DeskType", "Desk"), "unknown kind"),
        (goal_text("put").replace("?r - receptacle", "?r - object"), "unknown kind"),
        (goal_text("two").replace("?b MugType", "?b CupType"), "unknown kind"),
        (goal_text("light").replace("(inReceptacle ?ot ?r)", "(objectAtLocation ?ot ?l)"), "unknown kind"),
        (goal_text("light").replace("(toggleable ?ot)", "(sliceable ?x) (isSliced ?x)"), "?x is not bound"),  # AlfWorld's slip
        # A second receptacle or lamp: each condition holds for another one.
        ("(and (exists (?r - receptacle ?o - object) (and (inReceptacle ?o ?r) (objectType ?o MugType)))"
         " (exists (?r - receptacle) (receptacleType ?r DeskType)))", "unknown kind"),
    ],
)  # fmt: skip
def test_other_goals_are_refused(goal, reason):
    with pytest.raises(GameError, match=reason.replace("?", r"\?")):
        parse_problem(with_goal(goal))


def test_a_problem_is_read_into_facts_without_costs():
    problem = parse_problem(PROBLEM)
    assert problem.goal == Goal("pick_and_place_simple", "mug", "desk")
    assert problem.objects["loc_bar_0"] == "location"
    assert problem.objects["mug_bar_2"] == "object"
    assert problem.objects["sink_bar_1_bar_sinkbasin"] == "receptacle"
    assert problem.objects["sinkbasintype"] == "rtype"
    assert len(problem.objects) == 1 + 3 + 3 + 4 + 2 + 3
    assert ("inreceptacle", "mug_bar_1", "drawer_bar_1") in problem.facts
    assert ("opened", "drawer_bar_1") in problem.facts
    assert not any(fact[0] in ("=", "distance") for fact in problem.facts)
    assert len(problem.facts) == 27


def test_a_problem_is_written_so_that_it_reads_the_same():
    problem = parse_problem(PROBLEM)
    again = parse_problem(render_problem(problem))
    assert (again.facts, again.goal) == (problem.facts, problem.goal)
    missing = {"microwavetype": "rtype", "fridgetype": "rtype", "knifetype": "otype", "butterknifetype": "otype"}
    assert again.objects == {**problem.objects, **missing}  # the domain names these
    assert parse_problem(render_problem(again)) == again


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "brackets do not match"),
        ("(define", "brackets do not match"),
        ("(define))", "bracket too many"),
        ("(define) (define)", "brackets do not match"),
        ("(define (problem p))", "no :objects"),
        ("(define (:objects a - agent) (:init))", "no :goal"),
        ("(define (:objects a - agent) (:goal (and)))", "no :init"),
        ("(define (:objects a - agent) (:init) (:goal))", "goal is not one expression"),
        ("(define (:objects a) (:init) (:goal (and)))", "'a' has no type"),
        ("(define (:objects (a) - agent) (:init) (:goal (and)))", "objects are not a list of names"),
        ("(define (:objects) (:init opened) (:goal (and)))", "not a list of facts"),
        ("(define (:objects) (:init ()) (:goal (and)))", "not a list of facts"),
        ("(define (:objects) (:init (opened a b)) (:goal (and)))", "'opened' does not have"),
        ("(define (:objects) (:init (opened (a))) (:goal (and)))", "'opened' does not have"),
    ],
)
def test_malformed_problems_are_refused(text, reason):
    with pytest.raises(GameError, match=reason):
        parse_problem(text)


# The scene


def test_names_are_numbered_from_the_last_id_down():
    ids = ("apple_bar_1", "apple_bar_2", "apple_bar_9", "sink_bar_1", "sink_bar_1_bar_sinkbasin", "cup_bar_1")
    facts = frozenset(("opened", entity) for entity in ids if entity != "cup_bar_1")
    problem = Problem(dict.fromkeys(ids, "object"), facts, Goal("pick_and_place_simple", "apple", "desk"))
    assert names_of(problem) == {  # the cup is declared, but no fact is about it
        "apple_bar_1": "apple 3", "apple_bar_2": "apple 2", "apple_bar_9": "apple 1",
        "sink_bar_1": "sink 1", "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
    }  # fmt: skip


def test_ids_are_sorted_as_text():
    ids = [f"apple_bar_{number}" for number in range(1, 12)]
    problem = Problem(
        dict.fromkeys(ids, "object"), frozenset(("opened", i) for i in ids), Goal("pick_and_place_simple", "apple", "desk")
    )
    names = names_of(problem)
    assert [names[f"apple_bar_{number}"] for number in (1, 10, 11, 2, 9)] == [
        "apple 11", "apple 10", "apple 9", "apple 8", "apple 1",
    ]  # fmt: skip


def test_a_problem_becomes_a_scene_and_its_first_state():
    game = game_of(parse_problem(PROBLEM), PUT, ("look",))
    assert list(game.scene.receptacles.items()) == [  # the shelf is at no location, and no fact is about it
        ("desk 1", Receptacle("desk", "loc_bar_1")),
        ("drawer 1", Receptacle("drawer", "loc_bar_1", is_openable=True)),
        ("sinkbasin 1", Receptacle("sinkbasin", "loc_bar_2")),
    ]
    assert list(game.scene.objects.items()) == [
        ("lamp 1", Thing("desklamp", frozenset({"toggle"}))),
        ("mug 2", Thing("mug", frozenset({"pickup", "heat"}), inside=("lamp 1",))),
        ("mug 1", Thing("mug", frozenset({"pickup"}))),
    ]
    assert game.scene.fits == {"desk": frozenset({"mug"}), "drawer": frozenset({"mug"})}
    start = game.start
    assert (start.at, start.held) == ("loc_bar_1", "")
    assert start.contents == {"desk 1": ["mug 2", "mug 1"], "drawer 1": ["lamp 1", "mug 2"]}
    assert start.spots == {("mug 2", "loc_bar_2")}
    assert (start.opened, start.hot, start.clean, start.toggled) == ({"drawer 1"}, {"mug 1"}, set(), set())
    assert (game.instruction, game.walkthrough) == (PUT, ("look",))


def test_what_is_held_at_the_start():
    text = PROBLEM.replace("(isHot Mug_bar_2) (inReceptacle Mug_bar_2 Desk_bar_1)", "(holds agent1 Mug_bar_2)")
    start = game_of(parse_problem(text), PUT).start
    assert start.held == "mug 1"
    assert start.contents["desk 1"] == ["mug 2"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("(atLocation agent1 loc_bar_1)", "", "agent is not at one location"),
        ("Lamp_bar_1", "Lamp", "'lamp' is not named in AlfWorld's way"),
        ("(opened Drawer", "(receptacleAtLocation Desk_bar_1 loc_bar_2) (opened Drawer", "two locations"),
    ],
)
def test_states_that_no_scene_can_have_are_refused(old, new, reason):
    with pytest.raises(GameError, match=reason):
        game_of(parse_problem(PROBLEM.replace(old, new)), PUT)


# Files


def game_file(folder: Path, **changes: object) -> Path:
    """A file as a build without TextWorld leaves it; a change to None takes the entry out."""
    data = {
        "pddl_domain": "", "grammar": "", "pddl_problem": PROBLEM, "solvable": True,
        "walkthrough": ["go to desk 1"], "instruction": PUT,
    }  # fmt: skip
    path = folder / "game.tw-pddl"
    write_json(path, {name: value for name, value in {**data, **changes}.items() if value is not None})
    return path


def test_a_game_file_is_read(tmp_path):
    game = read_game(game_file(tmp_path))
    assert (game.instruction, game.walkthrough) == (PUT, ("go to desk 1",))
    assert game.problem == parse_problem(PROBLEM)
    assert read_game(game_file(tmp_path, walkthrough=None)).walkthrough == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"solvable": None}, "nobody has checked"),
        ({"solvable": False}, "^unsolvable$"),
        ({"grammar": None}, "grammar or pddl_problem is missing"),
        ({"pddl_problem": 3}, "pddl_problem is missing"),
        ({"pddl_problem": "(define"}, "brackets"),
        ({"pddl_problem": PROBLEM.replace("Lamp_bar_1 - object", "- object")}, "malformed .*lamp"),
        ({"instruction": None}, "no instruction"),
        ({"grammar": '{"rhs": "Your task is to: put a mug in desk."} and other words'}, "texts of another AlfWorld version"),
        ({"pddl_domain": "(define (domain alfred))"}, "planning domain of another AlfWorld version"),
    ],
)
def test_game_files_that_cannot_be_used(tmp_path, changes, reason):
    with pytest.raises(GameError, match=reason):
        read_game(game_file(tmp_path, **changes))


def test_files_that_are_no_games(tmp_path):
    path = tmp_path / "game.tw-pddl"
    with pytest.raises(GameError, match=r"no game\.tw-pddl"):
        read_game(path)
    for text, reason in (("{", "not JSON"), ("[1]", "not a JSON object")):
        path.write_text(text)
        with pytest.raises(GameError, match=reason):
            read_game(path)


def test_damaged_problems_are_refused_and_nothing_else_happens(tmp_path):
    rng = Random(0)
    words = PROBLEM.split()
    refused = 0
    for _ in range(300):
        damaged = list(words)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(damaged))
            damaged[place : place + rng.randint(0, 2)] = rng.choice(([], [rng.choice(words)], ["("], [")"], ["x"]))
        path = game_file(tmp_path, pddl_problem=" ".join(damaged))
        try:
            read_game(path)
        except GameError:
            refused += 1
    assert refused > 150


def test_the_instruction_is_in_the_grammar():
    grammar = 'grammar :: """{"task": [{"rhs": "Your task is to: UNKNOWN GOAL."}]}"""'
    assert instruction_of(grammar) == ""
    filled = with_instruction(grammar, r"put a \1 mug in desk")
    assert filled == r'grammar :: """{"task": [{"rhs": "Your task is to: put a \1 mug in desk."}]}"""'
    assert instruction_of(filled) == r"put a \1 mug in desk"
    assert instruction_of("") == ""


def test_fingerprints_overlook_comments_white_space_and_the_instruction():
    domain = "(define (domain d) ; why\n  (:predicates (opened ?r))\n)"
    assert fingerprint(domain) == fingerprint("(define (domain d)\n;; a line\n(:predicates   (opened ?r)))")
    assert fingerprint(domain) != fingerprint(domain.replace("opened", "closed"))
    grammar = '"rhs": "Your task is to: UNKNOWN GOAL."\ntemplate :: "move {o} to {r}";'
    assert fingerprint(grammar) == fingerprint(with_instruction(grammar, PUT))
    assert fingerprint(grammar) != fingerprint(grammar.replace("move {o} to {r}", "put {o} in/on {r}"))


def test_the_installed_alfworld_speaks_the_simulators_dialect(needs_engine, tmp_path):
    domain, grammar = engine_texts()
    assert {fingerprint(domain), fingerprint(grammar)} == DIALECTS
    written = with_instruction(grammar, PUT)
    path = game_file(tmp_path, pddl_domain=domain, grammar=written, instruction=None)
    assert read_game(path).instruction == PUT
    older = written.replace("move {o} to {r}", "put {o} in/on {r}")
    path = game_file(tmp_path, pddl_domain=domain, grammar=older, instruction=None)
    with pytest.raises(GameError, match="use backend textworld"):
        read_game(path)
    assert read_game(path, known_dialect_only=False).instruction == PUT


def test_the_engine_gets_the_files_own_texts(tmp_path):
    grammar = '"Your task is to: put a mug in desk."'
    path = game_file(tmp_path, pddl_domain="(d)", grammar=grammar, instruction=None)
    assert read_engine_texts(path) == {"pddl_domain": "(d)", "grammar": grammar, "pddl_problem": PROBLEM}
    assert read_engine_texts(path, "heat it")["grammar"] == '"Your task is to: heat it."'


def test_missing_engine_texts_are_the_installed_ones(tmp_path, monkeypatch):
    path = game_file(tmp_path)
    module = "rla_lightning.environments.alfworld.games.engine_texts"
    monkeypatch.setattr(module, lambda: ("(domain)", '"Your task is to: UNKNOWN GOAL."'))
    texts = read_engine_texts(path)
    assert (texts["pddl_domain"], texts["grammar"]) == ("(domain)", '"Your task is to: put a mug in desk."')
    monkeypatch.setattr(module, lambda: None)
    with pytest.raises(ConfigError, match=r"rla_lightning\[alfworld\]"):
        read_engine_texts(path)


def test_engine_texts_without_alfworld(monkeypatch):
    monkeypatch.setattr("rla_lightning.environments.alfworld.games.find_spec", lambda name: None)
    assert engine_texts() is None


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": {1}})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]


# Folders


MUG, HEAT = "pick_and_place_simple-Mug-None-Desk-308", "pick_heat_then_place_in_recep-Mug-None-Desk-7"


def make_folder(base: Path) -> None:
    for task, trial, names in (
        (MUG, "trial_2", ("game.tw-pddl", "traj_data.json")),
        (MUG, "trial_1", ("game.tw-pddl",)),
        (HEAT, "trial_1", ("game.tw-pddl", "traj_data.json")),
        (HEAT, "trial_2", ("traj_data.json", "initial_state.pddl")),
        ("pick_and_place_with_movable_recep-Mug-Bowl-Desk-308", "trial_1", ("game.tw-pddl",)),
        ("pick_three-Mug-None-Desk-308", "trial_1", ("game.tw-pddl",)),
        ("pick_three-Mug-None-Desk-308", "notes", ("readme.txt",)),
    ):
        folder = base / "train" / task / trial
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("{}")


@pytest.mark.parametrize("inner", ["", "json_2.1.1"])
def test_a_folder_is_indexed_and_what_is_skipped_is_counted(tmp_path, inner):
    make_folder(tmp_path / inner)
    folder = index_games(tmp_path)
    assert folder.root == tmp_path / inner
    assert folder.games == {
        "train": (
            GameEntry(f"train/{MUG}/trial_1/game.tw-pddl", "pick_and_place_simple", "308"),
            GameEntry(f"train/{MUG}/trial_2/game.tw-pddl", "pick_and_place_simple", "308"),
            GameEntry(f"train/{HEAT}/trial_1/game.tw-pddl", "pick_heat_then_place_in_recep", "7"),
        ),
        "valid_seen": (),
        "valid_unseen": (),
    }
    assert folder.skipped == {
        "no game.tw-pddl": 1, "movable receptacles are not supported": 1, "an unknown kind of task": 1,
    }  # fmt: skip


def test_kinds_can_be_left_out(tmp_path):
    make_folder(tmp_path)
    kinds = [kind for kind in GOAL_KINDS if kind != "pick_and_place_simple"]
    folder = index_games(tmp_path, kinds)
    assert [entry.kind for entry in folder.games["train"]] == ["pick_heat_then_place_in_recep"]
    assert folder.skipped["a kind of task that is left out"] == 2


def test_a_missing_folder_is_named_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"/nowhere'.*rla games .*/nowhere --number"):
        index_games(tmp_path / "nowhere")
