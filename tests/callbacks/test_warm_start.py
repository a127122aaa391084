from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from callbacks import warm_start
from callbacks.warm_start import Lessons, WarmStart
from rla_lightning.environments.base import Episode, TestedEnvironment
from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.formats import CompactJudgeFormat, CompactPolicyFormat
from rla_lightning.rollout.formats_code import CompactTestFormat
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.settings import RolloutSettings
from rla_lightning.types import ConfigError, ExpertAction, ExpertTest, Observation, Task, UnitTest

TINY = TinySpec(width=16, layers=1, heads=2, mlp_width=32)
EVERY_DIFFICULTY = (0.0, 1.0)


class Watched(HouseholdEnvironment):
    """Notes what is played, what the expert would do and what the true labels are."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.experts, self.labels = [], [], []

    def start(self, task):
        self.started.append(task.id)
        return super().start(task)

    def expert(self, episode, rng):
        expert = super().expert(episode, rng)
        self.experts.append((episode.observation, expert))
        return expert

    def label_step(self, episode, action):
        self.labels.append(super().label_step(episode, action))
        return self.labels[-1]


class WatchedJudge(CompactJudgeFormat):
    def __init__(self) -> None:
        self.shown, self.taught = [], []

    def prompt(self, tokenizer, history, observation, action, raw_text, is_valid, feedback):
        self.shown.append((observation, action, raw_text, is_valid))
        return super().prompt(tokenizer, history, observation, action, raw_text, is_valid, feedback)

    def answer(self, tokenizer, label):
        self.taught.append(label)
        return super().answer(tokenizer, label)


@pytest.fixture
def watched(make_loop) -> ClosedLoop:
    return make_loop(environment=Watched(), judge_format=WatchedJudge())


def lessons(loop: ClosedLoop, seed: int = 0, held_out: frozenset[str] = frozenset(), **options):
    return WarmStart(cache=None, **{"episodes": 4, **options}).lessons(loop.players, EVERY_DIFFICULTY, held_out, seed)


# Lessons


def test_lessons_are_a_function_of_the_seed(make_loop):
    loop = make_loop()
    first = lessons(loop)
    assert lessons(loop) == first
    assert lessons(loop, seed=1) != first
    assert len(first.policy) == len(first.judge) > 20
    assert lessons(loop, episodes=2).policy == first.policy[: len(lessons(loop, episodes=2).policy)]


def test_held_out_tasks_are_never_played(watched):
    environment = watched.environment
    lessons(watched, episodes=6)
    played = list(dict.fromkeys(environment.started))
    environment.started.clear()
    lessons(watched, episodes=6, held_out=frozenset(played[::2]))
    assert environment.started == played[1::2]


def test_the_share_of_flipped_labels_is_the_label_noise(watched):
    lessons(watched, episodes=60, label_noise=0.25)
    true, taught = watched.environment.labels, watched.formats.judge.taught
    flipped = [t.score != label.score for t, label in zip(taught, true, strict=True)]
    assert len(flipped) > 600
    assert abs(sum(flipped) / len(flipped) - 0.25) < 4 * (0.25 * 0.75 / len(flipped)) ** 0.5
    assert all(t.critique == label.critique for t, label in zip(taught, true, strict=True))


def test_without_noise_the_lessons_are_the_experts_and_the_truth(watched):
    taught = lessons(watched, label_noise=0.0, action_noise=0.0, detour_rate=0.0, invalid_rate=0.0)
    environment, judge = watched.environment, watched.formats.judge
    assert judge.taught == environment.labels
    assert [sample.response_ids for sample in taught.policy] == expert_answers(watched)
    assert [action for _, action, _, _ in judge.shown] == [expert.action for _, expert in environment.experts]
    assert all(is_valid for *_, is_valid in judge.shown)


def expert_answers(loop: ClosedLoop) -> list[tuple[int, ...]]:
    tokenizer = loop.players.policy.tokenizer
    return [CompactPolicyFormat().answer(tokenizer, observation, expert) for observation, expert in loop.environment.experts]


def test_the_judge_sees_actions_that_do_not_count(watched):
    taught = lessons(watched, episodes=40, invalid_rate=0.2, label_noise=0.0).judge
    shown, environment = watched.formats.judge.shown, watched.environment
    invalid = [i for i, (*_, is_valid) in enumerate(shown) if not is_valid]
    assert 0.05 < len(invalid) / len(shown) < 0.25
    for i in invalid:
        observation, action, raw_text, _ = shown[i]
        assert action == ""
        assert CompactPolicyFormat().parse(raw_text, observation) is None
        assert environment.labels[i].score == -1
    assert any(shown[i][2] for i in invalid)  # some have words
    assert {sample.response_ids for i, sample in enumerate(taught) if i in set(invalid)} == {
        watched.formats.judge.answer(watched.players.reward_model.tokenizer, environment.labels[invalid[0]])
    }
    none = lessons(watched, episodes=5, invalid_rate=0.0)
    assert all(is_valid for *_, is_valid in shown[-len(none.judge) :])


def test_the_share_of_random_demonstrations_is_the_action_noise(watched):
    taught = lessons(watched, episodes=40, action_noise=0.3, detour_rate=0.0, invalid_rate=0.0).policy
    pairs = list(zip(taught, expert_answers(watched), strict=True))
    different = sum(sample.response_ids != expert for sample, expert in pairs) / len(pairs)
    # of n commands one is the expert's, so the share that differs is .3 (1 - 1/n)
    commands = [len(observation.commands) for observation, _ in watched.environment.experts]
    expected = sum(0.3 * (1 - 1 / n) for n in commands) / len(commands)
    assert abs(different - expected) < 4 * (0.3 * 0.7 / len(pairs)) ** 0.5


class NoLabels(HouseholdEnvironment):
    def label_step(self, episode, action):
        return None


class NoExpert(HouseholdEnvironment):
    def expert(self, episode, rng):
        return None


def test_an_environment_without_labels_can_teach_the_policy_alone(make_loop):
    loop = make_loop(environment=NoLabels())
    with pytest.raises(ConfigError, match=r"no step labels: set WarmStart\.judge_updates to 0"):
        lessons(loop)
    alone = lessons(loop, judge_updates=0)
    assert len(alone.policy) > 20
    assert alone.judge == ()


def test_an_environment_without_an_expert_is_named(make_loop):
    with pytest.raises(ConfigError, match="'household' has no expert"):
        lessons(make_loop(environment=NoExpert()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, "WarmStart.episodes must be at least 1, got 0"),
        ({"batch_size": 0}, "WarmStart.batch_size must be at least 1, got 0"),
        ({"label_noise": 1.5}, r"WarmStart.label_noise must be in \[0, 1\], got 1.5"),
        ({"difficulty_low": 0.7, "difficulty_high": 0.2}, "0 <= difficulty_low <= difficulty_high <= 1, got 0.7 and 0.2"),
        ({"invalid_rate": -0.1}, r"WarmStart.invalid_rate must be in \[0, 1\], got -0.1"),
    ],
)
def test_settings_that_cannot_work_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        WarmStart(**options)


# Teaching and the cache


def start(loop: ClosedLoop, cache: Path | None, ckpt_path: str | None = None, **options) -> dict[str, torch.Tensor]:
    """Weights after the warm start of a trainer that has just set everything up."""
    datamodule = SimpleNamespace(difficulty=EVERY_DIFFICULTY, pool=SimpleNamespace(held_out=frozenset()))
    strategy = SimpleNamespace(barrier=lambda: None, broadcast=lambda value: value)
    trainer = SimpleNamespace(ckpt_path=ckpt_path, datamodule=datamodule, is_global_zero=True, strategy=strategy)
    settings = {"episodes": 3, "policy_updates": 2, "judge_updates": 2, "batch_size": 4, "cache": cache}
    WarmStart(**{**settings, **options}).on_fit_start(trainer, loop)
    return weights(loop)


def weights(loop: ClosedLoop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in loop.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], model: str) -> bool:
    keys = [name for name in first if name.startswith(f"{model}.")]
    assert keys
    return all(torch.equal(first[name], second[name]) for name in keys)


def test_lessons_can_be_of_other_difficulties_than_fresh_tasks(make_loop, monkeypatch):
    asked = []
    monkeypatch.setattr(WarmStart, "lessons", lambda self, players, difficulty, *_: asked.append(difficulty) or Lessons((), ()))
    for options in ({}, {"difficulty_low": 0.25}, {"difficulty_low": 0.1, "difficulty_high": 0.3}):
        start(make_loop(), None, policy_updates=0, judge_updates=0, **options)
    low, high = EVERY_DIFFICULTY
    assert asked == [(low, high), (0.25, high), (0.1, 0.3)]


def test_a_cache_hit_gives_the_weights_that_training_gives(make_loop, tmp_path, monkeypatch):
    before = weights(make_loop())
    trained = start(make_loop(), tmp_path)
    assert [path.name.split("-")[0] for path in sorted(tmp_path.iterdir())] == ["policy", "reward_model"]  # nothing partial
    assert [same(before, trained, name) for name in ("policy", "reward_model", "critic")] == [False, False, True]
    uncached = start(make_loop(), None)
    monkeypatch.setattr(Scorer, "forward", lambda *_: pytest.fail("trained again"))
    cached = start(make_loop(), tmp_path)
    for name in ("policy", "reward_model"):
        assert same(trained, cached, name)
        assert same(trained, uncached, name)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("loop_options", "warm_start_options"),
    [
        ({}, {"policy_updates": 3, "judge_updates": 3}),
        ({}, {"matrix_lr": 0.01}),
        ({}, {"label_noise": 0.1, "action_noise": 0.1}),
        ({"seed": 1}, {}),
        ({"tiny": replace(TINY, heads=4)}, {}),  # equal weights at the start, another function
        ({"rollout": RolloutSettings(temperature=0.7)}, {}),
    ],
)
def test_the_cache_knows_everything_that_the_result_depends_on(make_loop, tmp_path, loop_options, warm_start_options):
    start(make_loop(), tmp_path)
    result = start(make_loop(**loop_options), tmp_path, **warm_start_options)
    assert len(list(tmp_path.iterdir())) == 4
    fresh = start(make_loop(**loop_options), None, **warm_start_options)
    assert same(result, fresh, "policy")
    assert same(result, fresh, "reward_model")


def test_a_resumed_run_is_left_alone(make_loop, tmp_path):
    before = weights(make_loop())
    after = start(make_loop(), tmp_path, ckpt_path="last.ckpt")
    assert all(same(before, after, name) for name in ("policy", "reward_model", "critic"))
    assert list(tmp_path.iterdir()) == []


def test_a_pretrained_model_is_left_alone(make_loop):
    loop = make_loop()
    before = weights(loop)
    loop.policy_spec = SimpleNamespace(path="org/name")
    after = start(loop, None)
    assert same(before, after, "policy")
    assert not same(before, after, "reward_model")


def test_zero_updates_leave_a_model_alone(make_loop):
    before = weights(make_loop())
    after = start(make_loop(), None, policy_updates=0)
    assert same(before, after, "policy")
    assert not same(before, after, "reward_model")


def test_only_adapters_are_taught_and_cached(make_loop, tmp_path):
    spec = LanguageModelSpec(tiny=TINY, lora=LoraSpec(rank=2))
    trained = start(make_loop(policy=spec), tmp_path, judge_updates=0)
    assert same(trained, start(make_loop(policy=spec), tmp_path, judge_updates=0), "policy")
    (file,) = tmp_path.iterdir()
    assert all("lora_" in name for name in warm_start.load_file(file))


def test_teaching_makes_the_demonstrations_likelier(make_loop):
    loop = make_loop()
    taught = lessons(loop, episodes=3)
    chosen = [taught.policy[i] for i in Random(0).sample(range(len(taught.policy)), 20)]
    batch = warm_start.batch_of(chosen, 0)

    def loss() -> float:
        with torch.no_grad():
            logprobs, _ = loop.policy(batch, 1.0)
        return -float((logprobs * batch.response_mask).sum() / batch.response_mask.sum())

    before = loss()
    start(loop, None, policy_updates=40, batch_size=16)
    assert loss() < before - 1.0


# Lessons of programs and unit tests


class Printers(TestedEnvironment):
    """Print a digit: a wrong program prints an x, a wrong test expects one."""

    name = "printers"

    def sample(self, rng, difficulty, split="in_domain"):
        digit = rng.randrange(10)
        return Task(f"print-{digit}", self.name, {"digit": str(digit)}, digit / 10, f"print-{digit}")

    def start(self, task):
        return Printing(task)

    def expert(self, episode, rng):
        return ExpertAction(f"print {episode.digit}", "#easy")

    def detour(self, episode, rng):
        return "print x"

    def check_programs(self, requests):
        raise NotImplementedError

    def example_test(self, task, rng, is_right):
        return ExpertTest(UnitTest("0\n", f"{task.spec['digit'] if is_right else 'x'}\n"), "thus")

    def vocabulary(self):
        return ("print", "x", "#easy", "say", ":", "=", "thus", *"0123456789")


class Printing(Episode):
    max_turns = 1

    def __init__(self, task: Task) -> None:
        self.digit = task.spec["digit"]
        self.observation = Observation(f"say {self.digit}")

    def step(self, action):
        raise NotImplementedError


@pytest.fixture
def writer(make_loop):
    """A loop whose reward model writes unit tests."""

    def make(environment: TestedEnvironment | None = None) -> ClosedLoop:
        return make_loop(environment=environment or Printers(), test_format=CompactTestFormat())

    return make


def words(loop: ClosedLoop, samples) -> list[str]:
    """Prompts and answers."""
    tokens = loop.players.policy.tokenizer.convert_ids_to_tokens
    return [" ".join(tokens(list(sample.prompt_ids + sample.response_ids))) for sample in samples]


def test_lessons_of_programs_and_unit_tests(writer):
    loop = writer()
    taught = lessons(loop, episodes=20, action_noise=0.0, label_noise=0.0)
    assert len(taught.policy) == len(taught.judge) == 20
    digits = [line.split()[2] for line in words(loop, taught.policy)]
    assert len(set(digits)) > 5
    assert words(loop, taught.policy) == [f"<act> say {digit} #easy print {digit} </s>" for digit in digits]
    assert words(loop, taught.judge) == [f"<judge> say {digit} 0 : thus = {digit} </s>" for digit in digits]
    assert {sample.weight for sample in taught.judge} == {20**-0.5}  # all alike
    assert lessons(loop, episodes=20, action_noise=0.0, label_noise=0.0) == taught


def test_the_shares_of_wrong_programs_and_wrong_unit_tests_are_the_noise(writer):
    loop = writer()
    taught = lessons(loop, episodes=1000, action_noise=0.3, label_noise=0.1)
    programs, tests = words(loop, taught.policy), words(loop, taught.judge)
    wrong_programs = [line.endswith("#easy print x </s>") for line in programs]
    wrong_tests = [line.endswith("0 : thus = x </s>") for line in tests]
    assert abs(sum(wrong_programs) - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5
    assert abs(sum(wrong_tests) - 100) < 4 * (1000 * 0.1 * 0.9) ** 0.5
    both = sum(a and b for a, b in zip(wrong_programs, wrong_tests, strict=True))
    assert abs(both - 30) < 4 * (1000 * 0.03 * 0.97) ** 0.5  # one says nothing about the other
    only = lessons(loop, episodes=5, action_noise=1.0, label_noise=1.0)
    assert all(line.endswith("print x </s>") for line in words(loop, only.policy))
    assert all(line.endswith("= x </s>") for line in words(loop, only.judge))


def test_no_lessons_of_held_out_programs(writer):
    loop = writer()
    taught = lessons(loop, episodes=50, held_out=frozenset({"print-3", "print-4"}))
    shown = {line.split()[2] for line in words(loop, taught.policy)}
    assert {"3", "4"}.isdisjoint(shown)
    assert len(taught.policy) < 50


def test_an_environment_without_example_tests_can_teach_the_policy_alone(writer):
    class NoTests(Printers):
        def example_test(self, task, rng, is_right):
            return None

    loop = writer(NoTests())
    with pytest.raises(ConfigError, match=r"'printers' has no example tests: set WarmStart\.judge_updates to 0"):
        lessons(loop)
    alone = lessons(loop, judge_updates=0)
    assert len(alone.policy) == 4
    assert alone.judge == ()


def test_without_wrong_programs_all_demonstrations_are_right(writer):
    class NoMistakes(Printers):
        def detour(self, episode, rng):
            return None

    loop = writer(NoMistakes())
    assert not [line for line in words(loop, lessons(loop, action_noise=1.0).policy) if "x" in line]


def test_programs_without_an_expert_are_named(writer):
    class NoSolutions(Printers):
        def expert(self, episode, rng):
            return None

    with pytest.raises(ConfigError, match="'printers' has no expert"):
        lessons(writer(NoSolutions()))
