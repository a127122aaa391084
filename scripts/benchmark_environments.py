"""Speed of the simulators: the household, ours of ALFWorld, and stock TextWorld on the same games."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmark_report import measured, report, resident_megabytes, timed

from rla_lightning.environments.alfred.world import admissible, feedback, is_won
from rla_lightning.environments.alfworld import AlfWorldEnvironment
from rla_lightning.environments.alfworld.builder import build_games
from rla_lightning.environments.alfworld.engine import PACKAGES, TextWorldEngine
from rla_lightning.environments.alfworld.games import Game, read_engine_texts, read_game
from rla_lightning.environments.base import Environment
from rla_lightning.types import Task

FAST_STEPS = 20000  # of each simulator
MEMORY_EPISODES = 1000


def household(environment: Environment) -> None:
    seconds, peak_mb, steps = measured(lambda: environment_steps(environment, FAST_STEPS))
    report("environment", seconds, steps=steps, steps_per_second=round(steps / seconds), peak_mb=peak_mb)


def environment_steps(environment: Environment, steps: int) -> int:
    """Random admissible commands, each with its observation, commands and digest."""
    rng = Random("benchmark")
    done = 0
    while done < steps:
        episode = environment.start(environment.sample(rng, rng.random()))
        for _ in range(episode.max_turns):
            observation = episode.observation
            done += len(observation.digest) > 0
            if episode.step(rng.choice(observation.commands)).done:
                break
    return done


def alfworld(engine_steps: int, engine_loads: int) -> None:
    """Our simulator and stock TextWorld on the same full-size games."""
    with TemporaryDirectory() as folder:
        root = Path(folder) / "games"
        seconds, built = timed(lambda: build_games(root, 48))
        report("alfworld: build games", seconds, games=sum(sum(kinds.values()) for kinds in built.games.values()))
        environment = AlfWorldEnvironment(str(root))
        tasks = environment.corpus("train", "in_domain")
        files = [environment.root / task.spec["game"] for task in tasks]
        fast = fast_alfworld(environment, tasks, files)
        missing = [name for name in PACKAGES if find_spec(name) is None]
        if missing:
            report("alfworld: textworld", 0, skipped=f"{', '.join(missing)} not installed: make engine")
            return
        stock = stock_textworld(files, engine_steps)
        report("alfworld: fast against textworld", 0, **{f"{name}_ratio": round(stock[name] / fast[name]) for name in stock})
        worker_memory(files, engine_loads)


def fast_alfworld(environment: AlfWorldEnvironment, tasks: Sequence[Task], files: Sequence[Path]) -> dict[str, float]:
    """Seconds of one load, reset and step."""
    load, games = timed(lambda: [read_game(file) for file in files])
    for task in tasks:
        environment.start(task)  # fills the cache
    reset, _ = timed(lambda: [environment.start(task) for task in tasks for _ in range(20)])
    step, steps = timed(lambda: environment_steps(environment, FAST_STEPS))
    alone, alone_steps = timed(lambda: world_steps(games, FAST_STEPS))
    seconds = {"load": load / len(files), "reset": reset / len(tasks) / 20, "step": step / steps}
    report(
        "alfworld: fast",
        step,
        load_ms=round(1000 * seconds["load"], 3),
        reset_ms=round(1000 * seconds["reset"], 3),
        steps_per_second=round(steps / step),
        steps_per_second_without_digest=round(alone_steps / alone),
    )
    before = resident_megabytes()
    environment_episodes(environment, tasks, MEMORY_EPISODES)
    growth = resident_megabytes() - before
    report("alfworld: memory of fast", 0, episodes=MEMORY_EPISODES, growth_mb=round(growth, 2))
    return seconds


def world_steps(games: Sequence[Game], steps: int) -> int:
    """Random commands with their text, the next admissible commands and whether the game is won: no digest."""
    rng = Random("benchmark")
    done = 0
    while done < steps:
        game = rng.choice(games)
        world, actions = game.start.copy(), admissible(game.start)
        for _ in range(40):
            action = actions[rng.choice(sorted(actions))]
            world.apply(action)
            feedback(world, action)
            actions = admissible(world)
            done += 1
            if is_won(game.problem.goal, world):
                break
    return done


def environment_episodes(environment: Environment, tasks: Sequence[Task], number: int) -> None:
    rng = Random("memory")
    for _ in range(number):
        episode = environment.start(rng.choice(tasks))
        for _ in range(10):
            episode.step(rng.choice(episode.observation.commands))


def stock_textworld(files: Sequence[Path], steps: int) -> dict[str, float]:
    """Seconds of one load, reset and step, in this process."""
    sys.argv = sys.argv[:1]  # the planner's translator reads it
    import textworld  # noqa: PLC0415
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # noqa: PLC0415
    from textworld.envs import PddlEnv  # noqa: PLC0415

    rng = Random("benchmark")
    environment = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
    spent = dict.fromkeys(("load", "reset", "step"), 0.0)
    episodes = done = 0
    while done < steps:
        texts = read_engine_texts(rng.choice(files))
        load, _ = timed(lambda: environment.load(texts))  # noqa: B023
        reset, state = timed(environment.reset)
        spent["load"], spent["reset"], episodes = spent["load"] + load, spent["reset"] + reset, episodes + 1
        for _ in range(40):
            command = rng.choice(sorted(state.admissible_commands))
            step, (state, _, is_over) = timed(lambda: environment.step(command))  # noqa: B023
            spent["step"], done = spent["step"] + step, done + 1
            if is_over:
                break
    seconds = {"load": spent["load"] / episodes, "reset": spent["reset"] / episodes, "step": spent["step"] / done}
    report(
        "alfworld: textworld",
        sum(spent.values()),
        load_ms=round(1000 * seconds["load"], 1),
        reset_ms=round(1000 * seconds["reset"], 1),
        steps_per_second=round(1 / seconds["step"], 1),
    )
    return seconds


def worker_memory(files: Sequence[Path], loads: int) -> None:
    """Of an engine worker that plays one game after the other."""
    engine = TextWorldEngine(workers=1)
    known = {child.pid for child in multiprocessing.active_children()}
    sizes = []
    start = time.perf_counter()
    for number in range(loads):
        episode = engine.start(read_engine_texts(files[number % len(files)]), max_turns=1)
        episode.step("look")
        (worker,) = (child.pid for child in multiprocessing.active_children() if child.pid not in known)
        sizes.append(resident_megabytes(worker))
    engine.close()
    first = sizes[min(9, loads - 1)]
    growth = round(sizes[-1] - first, 1)
    report("alfworld: memory of a textworld worker", time.perf_counter() - start, loads=loads, mb=round(first), growth_mb=growth)
