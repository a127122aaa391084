"""Speed of each stage on this machine, as JSON lines: `python scripts/benchmark.py [--updates N] [--threads N]`.

Everything runs in one process and one after the other; compare lines of one run, not of two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.batching import Sample, make_micro_batch
from rla_lightning.rollout.logprobs import response_logprobs
from rla_lightning.types import RolloutGroup, SamplingParams


def report(stage: str, seconds: float, **numbers: Any) -> None:
    print(json.dumps({"stage": stage, "seconds": round(seconds, 4), **numbers}), flush=True)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def environment_steps(environment: HouseholdEnvironment, steps: int) -> int:
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


def response_tokens(groups: list[RolloutGroup]) -> int:
    return sum(len(step.completion.token_ids) for group in groups for t in group.trajectories for step in t.steps)


def recomputed(loop: ClosedLoop, prompts: list[tuple[int, ...]], new_tokens: int) -> None:
    """The plain way to sample: no cache, the whole sequence again for every token."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(p)) for p in prompts], batch_first=True, padding_side="left")
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = loop.policy(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1]  # type: ignore[misc]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
            mask = torch.cat([mask, torch.ones(len(ids), 1)], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report("machine", 0, commit=commit, threads=arguments.threads, torch=torch.__version__)

    environment = HouseholdEnvironment()
    seconds, steps = timed(lambda: environment_steps(environment, 20000))
    report("environment", seconds, steps=steps, steps_per_second=round(steps / seconds))

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

    batch = make_micro_batch([Sample(step.prompt_ids, step.completion.token_ids, 1.0) for step in steps_[:512]], 0)
    optimizer = torch.optim.AdamW(loop.policy.parameters(), lr=1e-4)

    def update() -> None:
        for _ in range(arguments.updates):
            logprobs, _ = response_logprobs(loop.policy, batch, 1.0)  # type: ignore[arg-type]
            (-(logprobs * batch.response_mask).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    seconds, _ = timed(update)
    trained = arguments.updates * int(batch.attention_mask.sum())
    padding = 1 - float(batch.attention_mask.float().mean())
    report("update", seconds, tokens_per_second=round(trained / seconds), padding_fraction=round(padding, 3))


if __name__ == "__main__":
    main()
