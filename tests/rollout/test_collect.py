import logging
import re
from dataclasses import replace
from random import Random

import pytest

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.rollout.collect import collect, fit, judge, require_played
from rla_lightning.rollout.formats import (
    CompactCriticFormat,
    CompactJudgeFormat,
    CompactPolicyFormat,
    Turn,
    encode_words,
    gap_notes,
)
from rla_lightning.rollout.sampler import Sampler
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import (
    Completion,
    ConfigError,
    EpisodesFailedError,
    Observation,
    RolloutGroup,
    SamplingParams,
    Step,
    StepLabel,
    Task,
    Trajectory,
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


class Script(Sampler):
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
    defaults = {
        "environment": Corridor(), "policy_format": CompactPolicyFormat(), "critic_format": CompactCriticFormat(), "key": "seed"
    }  # fmt: skip
    return collect(
        tasks,
        group_size,
        sampler=sampler,
        tokenizer=tokenizer,
        params=SamplingParams(max_new_tokens=4),
        **{**defaults, **options},
    )


def vote(tokenizer, groups, m, sampler, **options):
    return judge(
        groups,
        m,
        sampler=sampler,
        tokenizer=tokenizer,
        params=SamplingParams(max_new_tokens=4),
        **{"key": "judge", "judge_format": CompactJudgeFormat(), **options},
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
    (group,) = play(tokenizer, [make_task("a")], 1, sampler, context_length=6)
    assert group.rollouts == 0
    with pytest.raises(EpisodesFailedError, match=message):
        require_played([group])
    assert play(tokenizer, [make_task("a")], 1, sampler, context_length=7)[0].successes == 1
    with pytest.raises(ConfigError, match="got 0 and None"):
        play(tokenizer, [make_task("a")], 0, sampler)
    with pytest.raises(ConfigError, match="no tasks"):
        play(tokenizer, [], 1, sampler)
    groups = play(tokenizer, [make_task("a")], 1, sampler)
    with pytest.raises(ConfigError, match="got 0"):
        vote(tokenizer, groups, 0, sampler)


class Growing:
    """Every earlier turn is one word of the prompt, two where a gap is told; the state is the words of the observation."""

    def prompt(self, tokenizer, *shown):
        history, observation, *step = [part for part in shown if part != "reach goal"]
        words = [word for note in gap_notes(history) for word in (("far", "go") if note else ("go",))]
        return encode_words(tokenizer, ("<act>", *words, *observation.text.split(), *("near" for _ in step[:1])))

    def parse(self, text, observation=None):
        return 1 if observation is None else "go left"


def test_a_prompt_that_outgrows_the_context_ends_the_rollout(tokenizer):
    calls = []
    # turn k, from 0, has 1 + k + 2 tokens and 4 for the answer: that of turn 2 has 9
    tasks = [make_task("a"), make_task("b", 1)]
    groups = play(
        tokenizer,
        tasks,
        1,
        Script(tokenizer, right),
        policy_format=Growing(),
        context_length=8,
        progress=lambda *now: calls.append(now),
    )
    (first,), (second,) = (group.trajectories for group in groups)
    for trajectory in (first, second):
        assert (trajectory.outcome, trajectory.stop_reason, trajectory.error) == (-1.0, "TRUNCATED", "")
        assert [len(step.prompt_ids) for step in trajectory.steps] == [3, 4]
    assert (groups[0].rollouts, groups[0].successes, len(calls)) == (1, 0, 3)
    assert calls[-1] == ("rollout turn 2", 2, 2, 0.0)
    judged = vote(tokenizer, groups, 2, Script(tokenizer, right))
    assert [len(votes) for votes in judged[0].judgments[0]] == [2, 2]
    groups = play(tokenizer, tasks, 1, Script(tokenizer, right), policy_format=Growing(), context_length=6)
    assert [group.trajectories[0].stop_reason for group in groups] == ["ENV_ERROR"] * 2
    assert "the prompt of task a has 3 tokens" in groups[0].trajectories[0].error


def test_others_go_on_when_one_is_truncated(tokenizer):
    class Short(CompactPolicyFormat):
        def prompt(self, tokenizer, history, observation):
            return super().prompt(tokenizer, history, observation) * (
                5 if len(history) == 1 and observation.text == "2 left" else 1
            )

    sampler = Script(tokenizer, right)
    groups = play(tokenizer, [make_task("a", 3), make_task("b")], 1, sampler, policy_format=Short(), context_length=10)
    assert [g.trajectories[0].stop_reason for g in groups] == ["TRUNCATED", "DONE"]
    assert [keys for _, keys in sampler.calls] == [["seed/a/0/0", "seed/b/0/0"], ["seed/b/0/1"]]


def turns(number):
    return [Turn(n, Observation("near"), "go left") for n in range(1, number + 1)]


def test_fit_leaves_out_the_oldest_turns_after_the_first():
    rendered = []

    def prompt(history):
        rendered.append([turn.number for turn in history])
        return tuple(turn.number for turn in history)

    assert fit(prompt, turns(6), None) == (1, 2, 3, 4, 5, 6)
    assert fit(prompt, turns(6), 6) == (1, 2, 3, 4, 5, 6)
    assert fit(prompt, turns(6), 5) == (1, 3, 4, 5, 6)
    assert fit(prompt, turns(6), 4) == (1, 4, 5, 6)
    assert fit(prompt, turns(6), 2) == (1, 6)
    assert fit(prompt, turns(6), 1) is None
    assert fit(prompt, turns(2), 1) is None
    assert fit(prompt, [], 0) == ()
    rendered.clear()
    assert fit(prompt, turns(40), 17) == (1, *range(25, 41))
    assert len(rendered) <= 7  # a search by halves


def test_judge_prompts_that_do_not_fit(tokenizer, caplog):
    observed = [Observation("near")] * 5 + [Observation("near near near near near near")]
    steps = tuple(Step((), Completion((), (), "go left", "EOS"), seen, "go left", True) for seen in observed)
    group = RolloutGroup(make_task("a"), (Trajectory(make_task("a"), steps, -1.0, "MAX_TURNS"),))
    sampler = Script(tokenizer, lambda key, j: "+1")
    with caplog.at_level(logging.WARNING):
        (judged,) = vote(tokenizer, [group], 2, sampler, judge_format=Growing(), context_length=10)
    # 6 tokens of room. <act>, k turns, the state, "near" for the step: 3 + k. From k = 4 on "far" says that turns are left out.
    words = [tokenizer.convert_ids_to_tokens(list(votes[0].prompt_ids)) for votes in judged.judgments[0][:5]]
    assert words[3] == ["<act>", "go", "go", "go", "near", "near"]
    assert words[4] == ["<act>", "go", "far", "go", "near", "near"]
    assert judged.judgments[0][5] == ()  # six words of its own
    assert sampler.calls == [(2, [f"judge/a/0/{k}" for k in range(5)])]
    assert "1 of 6 steps are not judged: too long for a context of 10 tokens with max_new_tokens = 4" in caplog.text
    (silent,) = vote(tokenizer, [group], 2, sampler, judge_format=Growing(), context_length=5)
    assert silent.judgments == (((),) * 6,)


def test_critic_prompts_are_fitted(tokenizer):
    options = {"critic_format": Described(), "max_turns": 5}
    sampler = Script(tokenizer, lambda key, j: "go left")
    (group,) = play(tokenizer, [make_task("a")], 1, sampler, critic_context_length=6, **options)
    shown = [tokenizer.convert_ids_to_tokens(list(step.critic_ids)) for step in group.trajectories[0].steps]
    assert shown[3] == ["<act>", "go", "go", "go", "<unk>", "left"]
    assert shown[4] == ["<act>", "go", "far", "go", "<unk>", "left"]
    (group,) = play(tokenizer, [make_task("a")], 1, sampler, critic_context_length=2, **options)
    shown = [tokenizer.convert_ids_to_tokens(list(step.critic_ids)) for step in group.trajectories[0].steps]
    assert shown == [["<unk>", "left"]] * 5


class Described(Growing):
    def prompt(self, tokenizer, description, history, observation):
        return super().prompt(tokenizer, history, observation)


class Together(Corridor):
    """Steps all episodes by one call; a task's `fails` names the turn in which the engine breaks down."""

    def __init__(self, results=None) -> None:
        self.calls, self.results, self.log = [], results, []

    def start(self, task):
        self.log.append(f"start {task.id}")
        return Loading(task, self.log)

    def step_all(self, episodes, actions):
        self.calls.append(list(actions))
        return super().step_all(episodes, actions) if self.results is None else self.results(episodes, actions)


class Loading(Walk):
    def __init__(self, task, log) -> None:
        self.log, self.name = log, task.id
        super().__init__(replace(task, spec={**task.spec, "fails": None}))

    @property
    def observation(self):
        self.log.append(f"see {self.name}")
        if self.name == "broken":
            raise OSError("did not load")
        return self.see()

    @observation.setter
    def observation(self, value): ...


def test_engines_start_and_step_side_by_side(tokenizer):
    environment = Together()
    tasks = [make_task("a", 1), make_task("broken"), make_task("b", 2)]
    groups = play(tokenizer, tasks, 1, Script(tokenizer, right), environment=environment)
    assert environment.log[:6] == ["start a", "start broken", "start b", "see a", "see broken", "see b"]
    assert environment.calls == [["go right", "go right"], ["go right"]]
    assert [g.trajectories[0].stop_reason for g in groups] == ["DONE", "ENV_ERROR", "DONE"]
    assert groups[1].trajectories[0].error == "OSError: did not load"


def test_errors_of_engines(tokenizer, caplog):
    tasks = [make_task("a"), make_task("b")]

    def one_fails(episodes, actions):
        return (
            [OSError("engine 1 is gone"), episodes[1].step(actions[1])] if len(actions) == 2 else [episodes[0].step(actions[0])]
        )

    def all_fail(episodes, actions):
        raise OSError("no engine")

    def few(episodes, actions):
        return []

    def no_outcome(episodes, actions):
        return [Transition(Observation("?"), done=True)] * len(actions)

    for results, errors in (
        (one_fails, ["OSError: engine 1 is gone", ""]),
        (all_fail, ["OSError: no engine"] * 2),
        (few, ["ValueError: step_all returned 0 results for 2 episodes"] * 2),
        (no_outcome, ["ValueError: the episode is done with outcome None, not 1.0 or -1.0"] * 2),
    ):
        groups = play(tokenizer, tasks, 1, Script(tokenizer, right), environment=Together(results))
        assert [g.trajectories[0].error for g in groups] == errors
        assert [g.trajectories[0].stop_reason for g in groups] == ["ENV_ERROR" if error else "DONE" for error in errors]


def test_labels_come_before_the_step_and_a_failing_one_ends_its_rollout(tokenizer):
    class Labels(Together):
        def label_step(self, episode, action):
            if episode.name == "b":
                raise KeyError("no label")
            return StepLabel(1, f"#left {episode.left}")

    environment = Labels()
    tasks = [make_task("a", 1), make_task("b", 1)]
    groups = play(tokenizer, tasks, 1, Script(tokenizer, right), environment=environment, with_labels=True)
    assert groups[0].trajectories[0].steps[0].label == StepLabel(1, "#left 1")
    assert groups[1].trajectories[0].error == "KeyError: 'no label'"
    assert environment.calls == [["go right"]]
    assert play(tokenizer, tasks[1:], 1, Script(tokenizer, right), environment=environment, with_labels=True)[0].rollouts == 0
    assert environment.calls == [["go right"]]  # nothing was left to step
