"""Built games: which there are, that each can be won, that equal seeds give equal files, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rla_lightning.environments.alfred.scene import GOAL_KINDS
from rla_lightning.environments.alfred.world import admissible, is_won
from rla_lightning.environments.alfworld import builder, games
from rla_lightning.environments.alfworld.builder import BuiltGames, build_games
from rla_lightning.environments.alfworld.games import Game, read_game
from rla_lightning.environments.alfworld.rooms import entity_of, room_of
from rla_lightning.types import ConfigError

ROOM_OF_BLOCK = {0: "kitchen", 2: "livingroom", 3: "bedroom", 4: "bathroom"}  # hundreds of a scene number
ALL_ROOMS = {"kitchen", "livingroom", "bedroom", "bathroom"}
ROOMS_OF_KIND = {
    "pick_and_place_simple": ALL_ROOMS,
    "pick_two_obj_and_place": ALL_ROOMS,
    "look_at_obj_in_light": {"livingroom", "bedroom"},
    "pick_clean_then_place_in_recep": {"kitchen", "bathroom"},
    "pick_heat_then_place_in_recep": {"kitchen"},
    "pick_cool_then_place_in_recep": {"kitchen"},
}


def files_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def games_of(root: Path) -> dict[str, Game]:
    """By "subfolder/task/trial"."""
    paths = sorted((root / "json_2.1.1").rglob("game.tw-pddl"))
    return {path.parent.relative_to(root / "json_2.1.1").as_posix(): read_game(path) for path in paths}


def parts_of(name: str) -> tuple[str, str, str, str, int]:
    """(subfolder, kind, object, target, scene) from the folder's name."""
    subfolder, task, _ = name.split("/")
    kind, item, movable, target, scene = task.split("-")
    assert movable == "None"
    return subfolder, kind, item, target, int(scene)


def scenes_of(root: Path) -> list[int]:
    """Of the training games, in the order in which they were drawn."""
    names = [name for name in games_of(root) if name.startswith("train/")]
    return [parts_of(name)[-1] for name in sorted(names, key=lambda name: name.rpartition("/")[2])]


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> tuple[BuiltGames, Path]:
    root = tmp_path_factory.mktemp("full") / "games"
    return build_games(root, 96, seed=3, sliced_share=0.5), root


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[BuiltGames, Path]:
    root = tmp_path_factory.mktemp("small") / "games"
    return build_games(root, 50, seed=0, size="small", sliced_share=0), root


def test_kinds_come_in_equal_shares(full, small):
    of_96, of_12 = dict.fromkeys(GOAL_KINDS, 16), dict.fromkeys(GOAL_KINDS, 2)
    assert full[0].games == {"train": of_96, "valid_seen": of_12, "valid_unseen": of_12}  # 96 / 8 = 12
    assert sorted(small[0].games["train"].values()) == [8, 8, 8, 8, 9, 9]
    assert small[0].games["valid_seen"] == dict.fromkeys(GOAL_KINDS, 1)  # 50 / 8 is 6
    for report, root in (full, small):
        found = defaultdict(Counter)
        for name in games_of(root):
            subfolder, kind, *_ = parts_of(name)
            found[subfolder][kind] += 1
        assert found == report.games


def test_rooms_and_scene_numbers_are_alfreds(full, small):
    for _, root in (full, small):
        seen = set()
        for name in games_of(root):
            subfolder, kind, _, _, scene = parts_of(name)
            assert ROOM_OF_BLOCK[scene // 100] in ROOMS_OF_KIND[kind]
            assert scene % 100 in (range(1, 7) if subfolder == "valid_unseen" else range(7, 31))
            seen.add((kind, ROOM_OF_BLOCK[scene // 100]))
        assert {kind for kind, _ in seen} == set(GOAL_KINDS)
        assert {room for _, room in seen} == ALL_ROOMS


def test_a_scene_number_is_one_room(full):
    receptacles = defaultdict(list)
    objects = defaultdict(set)
    for name, game in games_of(full[1]).items():
        receptacles[parts_of(name)[-1]].append(game.scene.receptacles)
        objects[parts_of(name)[-1]].add(tuple(game.scene.objects))
    repeated = [scene for scene, rooms in receptacles.items() if len(rooms) > 1]
    assert len(repeated) > 10
    for scene in repeated:
        assert all(room == receptacles[scene][0] for room in receptacles[scene])
        assert len(objects[scene]) > 1  # what lies in it differs
    assert len({tuple(rooms[0].items()) for rooms in receptacles.values()}) > 0.9 * len(receptacles)


@pytest.mark.parametrize(("size", "least", "most"), [("full", 8, 40), ("small", 4, 10)])
def test_sizes_of_rooms(size, least, most):
    first = {"kitchen": 0, "livingroom": 200, "bedroom": 300, "bathroom": 400}
    rooms = [room_of(kind, block + i, 0, size) for kind, block in first.items() for i in range(1, 31)]
    counts = [len(room.receptacles) for room in rooms]
    assert least <= min(counts) < max(counts) <= most
    shared = sum(len({location for *_, location in room.receptacles}) < len(room.receptacles) for room in rooms)
    assert (shared > 40) is (size == "full")
    assert (shared == 0) is (size == "small")


def test_ids_are_named_in_alfworlds_way():
    assert [entity_of("cabinet", 3), entity_of("sinkbasin", 1)] == ["cabinet_bar_03", "sink_bar_01_bar_sinkbasin"]
    assert entity_of("bathtubbasin", 2) == "bathtub_bar_02_bar_bathtubbasin"


def test_walkthroughs_win_and_not_before_the_end(full, small):
    for _, root in (full, small):
        for name, game in games_of(root).items():
            world = game.start.copy()
            assert game.scene.receptacles_at(world.at) == (), name
            for command in game.walkthrough:
                assert not is_won(game.problem.goal, world), name
                world.apply(admissible(world)[command])
            assert is_won(game.problem.goal, world), name


def test_the_goals_objects_do_not_start_at_the_target(full, small):
    for _, root in (full, small):
        for name, game in games_of(root).items():
            goal, scene = game.problem.goal, game.scene
            for receptacle in scene.of_type(goal.target):
                lying = game.start.contents.get(receptacle, ())
                assert all(scene.type_of[item] != goal.object for item in lying), name


def test_folder_names_goals_and_instructions_agree(full):
    for name, game in games_of(full[1]).items():
        _, kind, item, target, _ = parts_of(name)
        goal = game.problem.goal
        assert (goal.kind, goal.object, goal.target) == (kind, item.removesuffix("Sliced").lower(), target.lower())
        assert goal.sliced is item.endswith("Sliced")
        assert goal.object in game.instruction
        assert goal.target in game.instruction
        assert ("slice" in game.instruction) is goal.sliced


def test_processes_do_not_end_at_their_appliance(full, small):
    appliances = {"pick_clean_then_place_in_recep": "SinkBasin", "pick_heat_then_place_in_recep": "Microwave"}
    appliances["pick_cool_then_place_in_recep"] = "Fridge"
    for _, root in (full, small):
        assert all(appliances.get(kind) != target for _, kind, _, target, _ in map(parts_of, games_of(root)))


def test_sliced_goals_have_a_knife_and_use_it(full, small):
    sliced = [game for game in games_of(full[1]).values() if game.problem.goal.sliced]
    assert len(sliced) == full[0].sliced > 10
    assert {game.problem.goal.kind for game in sliced} == set(GOAL_KINDS) - {"look_at_obj_in_light"}
    for game in sliced:
        assert game.scene.of_type("knife") + game.scene.of_type("butterknife")
        assert any(command.startswith("slice ") for command in game.walkthrough)
    assert small[0].sliced == 0
    assert not [name for name in games_of(small[1]) if "Sliced" in name]


def test_games_are_distinct_across_splits(full, small):
    for _, root in (full, small):
        problems = [(game.problem.facts, game.problem.goal) for game in games_of(root).values()]
        assert len(set(problems)) == len(problems)


def test_a_game_that_is_drawn_again_is_left_out(tmp_path, monkeypatch):
    draw, first, calls = builder._draw, {}, []

    def draw_again(room, kind, *others):
        calls.append(kind)
        game = draw(room, kind, *others)
        return first.setdefault(kind, game) if len(calls) % 2 else game  # every other draw is an old game

    monkeypatch.setattr(builder, "_draw", draw_again)
    build_games(tmp_path / "games", 24, size="small")
    problems = [game.problem.facts for name, game in games_of(tmp_path / "games").items() if name.startswith("train/")]
    assert len(set(problems)) == len(problems) == 24


def test_what_is_written_beside_a_game(full):
    for name in games_of(full[1]):
        folder = full[1] / "json_2.1.1" / name
        assert sorted(path.name for path in folder.iterdir()) == ["game.tw-pddl", "traj_data.json"]
        _, kind, item, target, scene = parts_of(name)
        said = json.loads((folder / "traj_data.json").read_text())
        light = kind == "look_at_obj_in_light"
        assert said["task_type"] == kind
        assert said["scene"] == {"floor_plan": f"FloorPlan{scene}", "scene_num": scene}
        assert said["pddl_params"] == {
            "object_target": item.removesuffix("Sliced"),
            "parent_target": "" if light else target,
            "toggle_target": target if light else "",
            "mrecep_target": "",
            "object_sliced": item.endswith("Sliced"),
        }


def test_equal_seeds_give_equal_files_and_others_do_not(tmp_path, small):
    build_games(tmp_path / "again", 50, seed=0, size="small", sliced_share=0)
    build_games(tmp_path / "other", 50, seed=1, size="small", sliced_share=0)
    assert files_of(tmp_path / "again") == files_of(small[1])
    assert scenes_of(tmp_path / "other") != scenes_of(small[1])


def test_a_game_does_not_depend_on_how_many_there_are(tmp_path, small):
    build_games(tmp_path / "fewer", 20, seed=0, size="small", evaluation_games=3, sliced_share=0)
    fewer, more = files_of(tmp_path / "fewer"), files_of(small[1])
    assert len(fewer) == 2 * (20 + 3 + 3)
    assert fewer.items() <= more.items()


def test_files_are_equal_in_every_process(tmp_path):
    """Sets of words have another order in every process, unless PYTHONHASHSEED is set."""
    code = "import sys; from pathlib import Path; from rla_lightning.environments.alfworld.builder import build_games\n"
    code += "build_games(Path(sys.argv[1]), 48, seed=0, evaluation_games=6, sliced_share=1)"
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / hash_seed)], check=True, env=environment)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1")


# Where games are written


def test_an_empty_folder_is_filled_even_when_it_is_the_present_one(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    folder = (tmp_path / "empty").stat().st_ino
    build_games(tmp_path / "empty", 1, size="small", evaluation_games=1)
    assert (tmp_path / "empty").stat().st_ino == folder  # not replaced: it may be a mount
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    build_games(Path("."), 1, size="small", evaluation_games=1)
    build_games(Path("deep") / "er", 1, size="small", evaluation_games=1)
    for root in (tmp_path / "empty", tmp_path / "here", tmp_path / "here" / "deep" / "er"):
        assert sorted(path.name for path in (root / "json_2.1.1").iterdir()) == ["train", "valid_seen", "valid_unseen"]
        assert not [path for path in root.iterdir() if path.name not in ("json_2.1.1", "deep")]


@pytest.mark.parametrize("name", ["full", "file"])
def test_nothing_is_overwritten(tmp_path, name):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=f"{name}' exists and is not an empty folder"):
        build_games(tmp_path / name, 1, size="small", evaluation_games=1)
    assert sorted(files_of(tmp_path)) == ["file", "full/notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"number": 0}, "number must be at least 1, got 0"),
        ({"number": 6, "evaluation_games": 0}, "evaluation_games must be at least 1, got 0"),
        ({"number": 6, "sliced_share": 1.5}, "sliced_share must be from 0 to 1, got 1.5"),
    ],
)
def test_impossible_numbers_are_refused(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_games(tmp_path / "games", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_a_broken_build_leaves_nothing(tmp_path, monkeypatch, is_there):
    written = []

    def write_three(path, data):
        written.append(path)
        if len(written) > 3:
            raise OSError("disk full")
        games.write_json(path, data)

    monkeypatch.setattr(builder, "write_json", write_three)
    root = tmp_path / "games"
    if is_there:
        root.mkdir()
    with pytest.raises(OSError, match="disk full"):
        build_games(root, 6, size="small")
    assert [path.name for path in tmp_path.rglob("*")] == (["games"] if is_there else [])


def test_when_no_game_can_be_drawn_the_kind_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "_draw", lambda *_: None)
    with pytest.raises(ConfigError, match="no more distinct games of kind pick_and_place_simple found for train"):
        build_games(tmp_path / "games", 6)
    assert not list(tmp_path.iterdir())


def test_a_faster_process_has_built_the_same_games(tmp_path, monkeypatch, small):
    write, root = builder._write, tmp_path / "games"

    def write_late(*arguments):
        if not root.exists():
            shutil.copytree(small[1], root)
        write(*arguments)

    monkeypatch.setattr(builder, "_write", write_late)
    build_games(root, 50, seed=0, size="small", sliced_share=0)
    assert files_of(root) == files_of(small[1])
    assert [path.name for path in tmp_path.iterdir()] == ["games"]


def test_without_alfworld_the_engines_texts_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(games, "find_spec", lambda _: None)
    report = build_games(tmp_path / "games", 6, seed=2, size="small")
    assert not report.has_engine_texts
    assert str(report).splitlines()[-1] == (
        "without TextWorld's texts: AlfWorld is not installed, so only the fast backend plays them"
    )
    for path in (tmp_path / "games").rglob("game.tw-pddl"):
        data = json.loads(path.read_text())
        assert (data["pddl_domain"], data["grammar"], data["solvable"]) == ("", "", True)
        game = read_game(path)
        assert game.instruction == data["instruction"]
        assert list(game.walkthrough) == data["walkthrough"]


def test_with_alfworld_its_texts_are_there(tmp_path, needs_engine):
    assert build_games(tmp_path / "games", 1, size="small", evaluation_games=1).has_engine_texts
    for path in (tmp_path / "games").rglob("game.tw-pddl"):
        data = json.loads(path.read_text())
        assert data["pddl_domain"].count("(define (domain alfred)") == 1
        assert f"Your task is to: {read_game(path).instruction}." in data["grammar"]
        assert "UNKNOWN GOAL" not in data["grammar"]
        assert "instruction" not in data  # as in AlfWorld's own files


def test_the_report_says_what_was_built():
    kinds = {"look_at_obj_in_light": 1, "pick_and_place_simple": 2}
    report = BuiltGames(Path("games"), {"train": kinds, "valid_seen": {}}, sliced=1, mean_steps=6.25, has_engine_texts=True)
    assert str(report).splitlines() == [
        "train: 3 games (look_at_obj_in_light 1, pick_and_place_simple 2)",
        "valid_seen: 0 games ()",
        "1 with something to slice; walkthroughs of 6.2 steps on average",
    ]
