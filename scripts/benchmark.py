"""Speed of each stage on this machine, as JSON lines: `python scripts/benchmark.py [--updates N] [--threads N]`.

Everything runs in one process and one after the other; compare lines of one run, not of two.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rla_lightning.environments.alfred.world import admissible, feedback, is_won
from rla_lightning.environments.alfworld import AlfWorldEnvironment
from rla_lightning.environments.alfworld.builder import build_games
from rla_lightning.environments.alfworld.engine import PACKAGES, TextWorldEngine
from rla_lightning.environments.alfworld.games import Game, read_engine_texts, read_game
from rla_lightning.environments.base import Environment
from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.batching import Sample, batch_of
from rla_lightning.types import RolloutGroup, SamplingParams, Task

FAST_STEPS = 20000  # of each simulator
MEMORY_EPISODES = 1000


def report(stage: str, seconds: float, **numbers: Any) -> None:
    print(json.dumps({"stage": stage, "seconds": round(seconds, 4), **numbers}), flush=True)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


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


def resident_megabytes(process: int | None = None) -> float:
    gc.collect()
    status = Path(f"/proc/{process or 'self'}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def response_tokens(groups: list[RolloutGroup]) -> int:
    return sum(len(step.completion.token_ids) for group in groups for t in group.trajectories for step in t.steps)


def recomputed(loop: ClosedLoop, prompts: list[tuple[int, ...]], new_tokens: int) -> None:
    """The plain way to sample: no cache, the whole sequence again for every token."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(p)) for p in prompts], batch_first=True, padding_side="left")
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = loop.policy.model(  # type: ignore[union-attr]
                input_ids=ids, attention_mask=mask, use_cache=False
            ).logits[:, -1]  # type: ignore[misc]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
            mask = torch.cat([mask, torch.ones(len(ids), 1)], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--engine-steps", type=int, default=200, help="of stock TextWorld, about 20 per second")
    parser.add_argument("--engine-loads", type=int, default=30, help="of games in a TextWorld worker, about 1 per second")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report("machine", 0, commit=commit, threads=arguments.threads, torch=torch.__version__)

    environment = HouseholdEnvironment()
    seconds, steps = timed(lambda: environment_steps(environment, FAST_STEPS))
    report("environment", seconds, steps=steps, steps_per_second=round(steps / seconds))
    alfworld(arguments.engine_steps, arguments.engine_loads)

    loop = ClosedLoop(environment)
    loop.configure_model()
    assert loop.policy is not None
    parameters = sum(weight.numel() for weight in loop.policy.parameters())
    tasks = [environment.sample(Random(f"benchmark/{i}"), i / arguments.tasks) for i in range(arguments.tasks)]
    seconds, groups = timed(lambda: loop.players.play(tasks, arguments.group_size, "benchmark", max_turns=None))
    turns = sum(len(t.steps) for group in groups for t in group.trajectories)
    tokens = response_tokens(groups)
    report("rollout", seconds, parameters=parameters, turns=turns, new_tokens_per_second=round(tokens / seconds))
    seconds, judged = timed(lambda: loop.players.judge(groups, "benchmark"))
    votes = sum(group.generated_tokens for group in judged) - tokens
    report("judge", seconds, steps=turns, new_tokens_per_second=round(votes / seconds))
    seconds, _ = timed(lambda: [loop.players.state_values(group) for group in judged])
    report("critic", seconds, states=turns)

    steps_ = [step for group in judged for t in group.trajectories for step in t.steps]
    prompts = [step.prompt_ids for step in steps_[:192]]
    new_tokens = 4
    cached, _ = timed(
        lambda: loop.players.policy_sampler.sample(
            prompts, 1, SamplingParams(max_new_tokens=new_tokens), [str(i) for i in range(len(prompts))]
        )
    )
    plain, _ = timed(lambda: recomputed(loop, prompts, new_tokens))
    report("cached against recomputed sampling", cached, recomputed_seconds=round(plain, 4), ratio=round(plain / cached, 2))

    batch = batch_of([Sample(step.prompt_ids, step.completion.token_ids, 1.0) for step in steps_[:512]], 0, loop.policy.width)
    optimizer = torch.optim.AdamW(loop.policy.parameters(), lr=1e-4)

    def update() -> None:
        for _ in range(arguments.updates):
            logprobs, _ = loop.policy(batch, 1.0)  # type: ignore[misc]
            (-(logprobs * batch.response_mask).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    seconds, _ = timed(update)
    trained = arguments.updates * batch.tokens
    padding = 1 - batch.tokens / batch.input_ids.numel()
    report("update", seconds, tokens_per_second=round(trained / seconds), padding_fraction=round(padding, 3))


if __name__ == "__main__":
    main()
