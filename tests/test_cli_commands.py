"""Commands of `rla` besides LightningCLI's: games."""

import json
from pathlib import Path

import pytest

from rla_lightning.cli import COMMANDS

SMALL = ("--size", "small", "--number", 6, "--evaluation_games", 6)


def test_commands_are_listed(rla) -> None:
    assert list(COMMANDS) == ["games"]
    assert "rla games --help" in rla("--help").out


def test_help(rla) -> None:
    ended = rla("games", "--help")
    assert ended.code == 0
    assert "Build AlfWorld games in a folder" in ended.out
    for option in ("--number", "--seed", "--size {full,small}", "--evaluation_games", "--sliced_share"):
        assert option in ended.out
    assert "of every random draw" in ended.out  # the functions' own descriptions


def test_games_are_built_and_reported(rla, tmp_path: Path) -> None:
    ended = rla("games", tmp_path / "built", *SMALL, "--sliced_share", 0)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    lines = ended.out.splitlines()
    kinds = (
        "look_at_obj_in_light 1, pick_and_place_simple 1, pick_clean_then_place_in_recep 1, "
        "pick_cool_then_place_in_recep 1, pick_heat_then_place_in_recep 1, pick_two_obj_and_place 1"
    )
    assert lines[:3] == [f"{name}: 6 games ({kinds})" for name in ("train", "valid_seen", "valid_unseen")]
    assert lines[3].startswith("0 with something to slice; walkthroughs of ")
    files = list((tmp_path / "built" / "json_2.1.1").rglob("game.tw-pddl"))
    assert len(files) == 18
    assert all(json.loads(file.read_text())["walkthrough"] for file in files)
    assert [path.name for path in tmp_path.iterdir()] == ["built"]  # nothing else is left


def test_equal_seeds_build_equal_games(rla, tmp_path: Path) -> None:
    contents = []
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        assert rla("games", tmp_path / name, *SMALL, "--seed", seed).code == 0
        files = sorted((tmp_path / name).rglob("game.tw-pddl"))
        contents.append([(str(file.relative_to(tmp_path / name)), file.read_text()) for file in files])
    assert contents[0] == contents[1] != contents[2]


def test_nothing_is_overwritten(rla, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    message = f"'{tmp_path}' exists and is not an empty folder: games are never overwritten"
    assert rla("games", tmp_path, *SMALL).message == message
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: root"),
        (("OUT", "--number", 0), "number must be at least 1, got 0"),
        (("OUT", "--number", "x"), "Parser key \"number\": Expected a <class 'int'>. Got value: x"),
        (("OUT", "--evaluation_games", "x"), "Parser key \"evaluation_games\": Expected a <class 'int'>. Got value: x"),
        (("OUT", "--size", "huge"), "Parser key \"size\": Expected a typing.Literal['full', 'small']. Got value: huge"),
        (("OUT", "--sliced_share", 2), "sliced_share must be from 0 to 1, got 2.0"),
        (("OUT", "--nmber", 6), "unrecognized arguments: --nmber 6"),
    ],
)
def test_bad_input(rla, tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    words = [tmp_path / "games" if word == "OUT" else word for word in arguments]
    assert rla("games", *words).message == message
    assert not (tmp_path / "games").exists()


def test_an_unknown_command(rla) -> None:
    assert "game" in rla("game").message
