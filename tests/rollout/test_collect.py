import logging
import re
from random import Random

import pytest

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.rollout.collect import collect, judge, require_played
from rla_lightning.rollout.formats import CompactCriticFormat, CompactJudgeFormat, CompactPolicyFormat
from rla_lightning.rollout.sampler import TransformersSampler
from rla_lightning.types import (
    Completion,
    ConfigError,
    EpisodesFailedError,
    Observation,
    SamplingParams,
    StepLabel,
    Task,
    Transition,
)

COMMANDS = ("go left", "go right")


class Corridor(Environment):
    """Win by going right `distance` times; "fails": "start" or a turn number raises."""

    name = "corridor"

    def sample(self, rng: Random, difficulty: float, split="in_domain") -> Task:
        return make_task(f"t{rng.random()}", 1 + round(3 * difficulty))

    def describe(self, task: Task) -> str:
        return "reach goal"

    def start(self, task: Task) -> Episode:
        if task.spec["fails"] == "start":
            raise OSError("no corridor")
        return Walk(task)

    def label_step(self, episode, action):
        return StepLabel(1 if action == "go right" else -1, f"#{'good' if action == 'go right' else 'bad'}")


class Walk(Episode):
    max_turns = 5

    def __init__(self, task: Task) -> None:
        self.left, self.fails, self.turn = task.spec["distance"], task.spec["fails"], 0
        self.observation = self.see()

    def see(self) -> Observation:
        return Observation(f"{self.left} left", COMMANDS, ("at", "far" if self.left > 1 else "near"))

    def step(self, action: str) -> Transition:
        self.turn += 1
        if self.fails == self.turn:
            raise ValueError("broken door")
        self.left -= action == "go right"
        self.observation = self.see()
        return Transition(self.observation, self.left == 0, 1.0 if self.left == 0 else None, action in COMMANDS)


class Script:
    """A sampler that answers with words chosen from the key."""

    def __init__(self, tokenizer, choose) -> None:
        self.tokenizer, self.choose, self.calls = tokenizer, choose, []

    def sample(self, prompts, n, params, keys):
        self.calls.append((n, list(keys)))
        return [[self.complete(self.choose(key, j)) for j in range(n)] for key in keys]

    def complete(self, text: str) -> Completion:
        ids = (*self.tokenizer.convert_tokens_to_ids(text.split()), 1)
        return Completion(ids, (0.0,) * len(ids), text, "EOS")


def make_task(name: str, distance: int = 2, fails=None) -> Task:
    return Task(name, "corridor", {"distance": distance, "fails": fails}, 0.5, name)


def play(tokenizer, tasks, group_size, sampler, **options):
    return collect(
        tasks,
        group_size,
        environment=Corridor(),
        sampler=sampler,
        tokenizer=tokenizer,
        policy_format=CompactPolicyFormat(),
        critic_format=CompactCriticFormat(),
        params=SamplingParams(max_new_tokens=4),
        **{"key": "seed", **options},
    )


def vote(tokenizer, groups, m, sampler, **options):
    return judge(
        groups,
        m,
        sampler=sampler,
        tokenizer=tokenizer,
        judge_format=CompactJudgeFormat(),
        params=SamplingParams(max_new_tokens=4),
        **{"key": "judge", **options},
    )


def right(key, j):
    return "#look go right"


def test_a_won_episode_is_recorded(tokenizer):
    sampler, seen = Script(tokenizer, right), []
    (group,) = play(tokenizer, [make_task("a")], 2, sampler, with_labels=True, progress=lambda *now: seen.append(now))
    assert sampler.calls == [(1, ["seed/a/0/0", "seed/a/1/0"]), (1, ["seed/a/0/1", "seed/a/1/1"])]
    assert (group.rollouts, group.successes) == (2, 2)
    first, second = group.trajectories[0].steps
    words = lambda ids: tokenizer.convert_ids_to_tokens(list(ids))  # noqa: E731
    assert words(first.prompt_ids) == ["<act>", "at", "far"]
    assert words(first.critic_ids) == ["<value>", "reach", "goal", "at", "far"]
    assert words(second.prompt_ids) == ["<act>", "at", "near"]
    assert (first.action, first.is_valid, first.feedback) == ("go right", True, "1 left")
    assert (first.label, second.feedback) == (StepLabel(1, "#good"), "0 left")
    assert (first.observation.text, group.trajectories[0].stop_reason) == ("2 left", "DONE")
    assert seen == [("rollout turn 1", 0, 2, 0.0), ("rollout turn 2", 2, 2, 1.0)]


def test_limits_and_invalid_answers(tokenizer):
    answers = lambda key, j: "go mug_1" if key.endswith(("/0", "/1")) else "go left"  # noqa: E731
    (group,) = play(tokenizer, [make_task("a")], 1, Script(tokenizer, answers))
    trajectory = group.trajectories[0]
    assert (trajectory.outcome, trajectory.stop_reason, len(trajectory.steps)) == (-1.0, "MAX_TURNS", 5)
    assert [(s.action, s.is_valid) for s in trajectory.steps[:3]] == [("", False), ("", False), ("go left", True)]
    assert trajectory.steps[0].label is None
    (group,) = play(tokenizer, [make_task("a")], 1, Script(tokenizer, right), max_turns=1)
    assert (group.trajectories[0].stop_reason, group.successes) == ("MAX_TURNS", 0)
    (group,) = play(tokenizer, [make_task("a")], 1, Script(tokenizer, right), max_turns=99)
    assert group.successes == 1


def test_a_failing_environment_ends_one_trajectory(tokenizer, caplog):
    tasks = [make_task("dead", fails="start"), make_task("fine"), make_task("door", fails=2)]
    with caplog.at_level(logging.WARNING):
        groups = play(tokenizer, tasks, 2, Script(tokenizer, right))
    assert [(g.rollouts, g.successes) for g in groups] == [(0, 0), (2, 2), (0, 0)]
    dead, door = groups[0].trajectories[0], groups[2].trajectories[1]
    assert (dead.error, dead.steps, dead.outcome) == ("OSError: no corridor", (), -1.0)
    assert (door.error, len(door.steps), door.stop_reason) == ("ValueError: broken door", 1, "ENV_ERROR")
    assert "task dead, rollout 0" in caplog.text
    assert "ValueError: broken door" in caplog.text
    judged = vote(tokenizer, groups, 3, Script(tokenizer, lambda key, j: "+1"))
    assert judged[0].judgments == ((), ())
    assert judged[2].judgments == (((),), ((),))
    assert [[len(votes) for votes in steps] for steps in judged[1].judgments] == [[3, 3], [3, 3]]
    require_played(groups)  # some episodes went well
    with pytest.raises(EpisodesFailedError, match="every episode failed, first error: OSError: no corridor"):
        require_played(play(tokenizer, tasks[:1], 2, Script(tokenizer, right)))


def test_judgments_are_votes_per_step(tokenizer):
    groups = play(tokenizer, [make_task("a"), make_task("b", 1)], 2, Script(tokenizer, right))
    sampler = Script(tokenizer, lambda key, j: ["#good +1", "#bad -1", "#bad"][j] if "/a/" in key else "+1")
    judged = vote(tokenizer, groups, 3, sampler)
    assert len(sampler.calls) == 1
    assert sampler.calls[0] == (3, [f"judge/{place}" for place in ("a/0/0", "a/0/1", "a/1/0", "a/1/1", "b/0/0", "b/1/0")])
    assert [vote.score for vote in judged[0].judgments[1][1]] == [1, -1, None]
    assert [vote.score for vote in judged[1].judgments[0][0]] == [1, 1, 1]
    words = tokenizer.convert_ids_to_tokens(list(judged[0].judgments[0][1][0].prompt_ids))
    assert words == ["<judge>", "at", "near", "<act>", "go", "right"]
    assert groups[0].judgments == ()


def test_rollouts_do_not_depend_on_the_split_over_processes(model, tokenizer):
    tasks = [make_task(name, 1 + i % 3) for i, name in enumerate("abcdef")]
    sampler = TransformersSampler(model, tokenizer)
    together = play(tokenizer, tasks, 3, sampler)
    apart = play(tokenizer, tasks[:2], 3, sampler) + play(tokenizer, tasks[2:], 3, sampler)
    shown = [[(s.action, s.completion.token_ids) for t in g.trajectories for s in t.steps] for g in together]
    assert shown == [[(s.action, s.completion.token_ids) for t in g.trajectories for s in t.steps] for g in apart]
    assert len({str(t.steps) for t in together[0].trajectories}) == 3  # rollouts of a group differ
    votes = [vote(tokenizer, part, 2, sampler) for part in (together, apart)]
    scores = [[v.completion.token_ids for g in part for t in g.judgments for s in t for v in s] for part in votes]
    assert scores[0] == scores[1]


def test_bad_input_is_named(tokenizer):
    sampler = Script(tokenizer, right)
    message = re.escape("the prompt of task a has 3 tokens; with max_new_tokens = 4 it exceeds the context of 6")
    with pytest.raises(ConfigError, match=message):
        play(tokenizer, [make_task("a")], 1, sampler, context_length=6)
    assert play(tokenizer, [make_task("a")], 1, sampler, context_length=7)[0].successes == 1
    with pytest.raises(ConfigError, match="got 0 and None"):
        play(tokenizer, [make_task("a")], 0, sampler)
    with pytest.raises(ConfigError, match="no tasks"):
        play(tokenizer, [], 1, sampler)
    groups = play(tokenizer, [make_task("a")], 1, sampler)
    with pytest.raises(ConfigError, match="got 0"):
        vote(tokenizer, groups, 0, sampler)
    with pytest.raises(ConfigError, match="task a has 6 tokens"):
        vote(tokenizer, groups, 1, sampler, context_length=8)
