"""Speed of the loop's stages on a tiny model: rollout, judge, critic, the cache of sampling, the policy's update."""

from __future__ import annotations

from random import Random

import torch
from benchmark_report import measured, report, timed
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rla_lightning.environments.base import Environment
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.batching import Sample, batch_of
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.types import RolloutGroup, SamplingParams, Step

NEW_TOKENS = 4  # of each answer of cached and of recomputed sampling


def loop_stages(environment: Environment, tasks: int, group_size: int, updates: int) -> None:
    """Play and judge `tasks` household tasks, then train on what was played."""
    loop = ClosedLoop(environment)
    loop.configure_model()
    assert loop.policy is not None
    size = {name: sum(w.numel() for w in model.parameters()) for name, model in loop.named_children()}
    report("models", 0, parameters=size, tasks=tasks, group_size=group_size)
    judged = sampling(loop, environment, tasks, group_size)
    steps = [step for group in judged for t in group.trajectories for step in t.steps]
    caching(loop, [step.prompt_ids for step in steps[:192]])
    training(loop.policy, steps[:512], updates)


def sampling(loop: ClosedLoop, environment: Environment, number: int, group_size: int) -> list[RolloutGroup]:
    """Every model answers once to every state."""
    tasks = [environment.sample(Random(f"benchmark/{i}"), i / number) for i in range(number)]
    seconds, peak_mb, groups = measured(lambda: loop.players.play(tasks, group_size, "benchmark", max_turns=None))
    turns = sum(len(t.steps) for group in groups for t in group.trajectories)
    tokens = sum(len(step.completion.token_ids) for group in groups for t in group.trajectories for step in t.steps)
    report("rollout", seconds, turns=turns, new_tokens_per_second=round(tokens / seconds), peak_mb=peak_mb)
    seconds, peak_mb, judged = measured(lambda: loop.players.judge(groups, "benchmark"))
    votes = sum(group.generated_tokens for group in judged) - tokens
    report("judge", seconds, steps=turns, new_tokens_per_second=round(votes / seconds), peak_mb=peak_mb)
    seconds, peak_mb, _ = measured(lambda: [loop.players.state_values(group) for group in judged])
    report("critic", seconds, states=turns, states_per_second=round(turns / seconds), peak_mb=peak_mb)
    return judged


def caching(loop: ClosedLoop, prompts: list[tuple[int, ...]]) -> None:
    """Sampling with what was read kept, against the plain way."""
    assert loop.policy is not None
    model, keys, params = loop.policy.model, [str(i) for i in range(len(prompts))], SamplingParams(max_new_tokens=NEW_TOKENS)
    cached, _ = timed(lambda: loop.players.policy_sampler.sample(prompts, 1, params, keys))
    plain, _ = timed(lambda: recomputed(model, prompts))
    report("cached against recomputed sampling", cached, recomputed_seconds=round(plain, 4), ratio=round(plain / cached, 2))


@torch.no_grad()
def recomputed(model: torch.nn.Module, prompts: list[tuple[int, ...]]) -> Tensor:
    """The plain way to sample: no cache, the whole sequence again for every token."""
    ids = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones(len(p)) for p in prompts], batch_first=True, padding_side="left")
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        mask = torch.cat([mask, torch.ones(len(ids), 1)], dim=1)
    return ids


def training(policy: Scorer, steps: list[Step], updates: int) -> None:
    batch = batch_of([Sample(step.prompt_ids, step.completion.token_ids, 1.0) for step in steps], 0, policy.width)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)

    def update() -> None:
        for _ in range(updates):
            logprobs, _ = policy(batch, 1.0)
            (-(logprobs * batch.response_mask).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    seconds, peak_mb, _ = measured(update)
    trained = updates * batch.tokens
    padding = 1 - batch.tokens / batch.input_ids.numel()
    report(
        "update",
        seconds,
        tokens=batch.tokens,
        tokens_per_second=round(trained / seconds),
        padding_fraction=round(padding, 3),
        peak_mb=peak_mb,
    )
