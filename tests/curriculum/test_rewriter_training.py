"""A rewriter that is trained on the verdicts on its proposals: hand-worked numbers, and learning with a tiny random model."""

import io
import math
import multiprocessing
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from rla_lightning.curriculum.adapters import ParametricAdapter, TaskAdapter
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.rewriter import COUNTED, REFUSALS, RewriterAdapter
from rla_lightning.curriculum.rewriter_training import (
    EARNED_NOTHING,
    Answer,
    Asked,
    Question,
    RewriterUpdateSettings,
    next_acceptance,
    rewrite_advantages,
)
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec
from rla_lightning.rollout.servers.openai import OpenAIServer
from rla_lightning.types import Completion, ConfigError, Decision, Direction, Split, Task, TaskFeedback, Verdict

GOOD, OTHERS = "good", ("dull", "odd", "poor")
PROMPT = "change the task"
LEARNED = ("reward", "samples", "loss", "grad_norm")


def make(name: str, parent: Task | None = None) -> Task:
    root, parent_id, version = (parent.root_id, parent.id, parent.version + 1) if parent else (name, None, 0)
    return Task(name, "words", {}, 0.5, root, parent_id, version)


class Words(Environment):
    """The first word of an answer is what a task becomes; those of the question are refused."""

    name = "words"

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        return make(f"{split}-{rng.randrange(10**6)}")

    def start(self, task: Task) -> Episode:
        raise NotImplementedError

    def rewrite_prompt(self, task: Task, direction: Direction, critique: str, successes: int, rollouts: int) -> str | None:
        return PROMPT

    def apply_rewrite(self, task: Task, answer: str) -> Task | str:
        words = answer.split()
        return make(f"{task.id}>{words[0]}", task) if words and words[0] in (GOOD, *OTHERS) else "no word to use"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that mostly says a word of the environment or ends."""
    place = tmp_path_factory.mktemp("model")
    words = (GOOD, *OTHERS, *PROMPT.split(), "Answer:")
    tiny = TinySpec(width=16, layers=1, heads=2, mlp_width=32, context_length=32)
    loaded = load_language_model(LanguageModelSpec(tiny=tiny), words, "a")
    embedding = loaded.model.get_input_embeddings().weight.data
    embedding += 1  # all hidden states are about (1, ..., 1), and the output layer is the embedding
    embedding[loaded.tokenizer.convert_tokens_to_ids([GOOD, *OTHERS, loaded.tokenizer.eos_token])] += 0.15
    loaded.model.save_pretrained(place)
    loaded.tokenizer.save_pretrained(place)
    return place


SGD = partial(torch.optim.SGD, lr=0.5)
ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)


def rewriter(folder: Path, optimizer: Any = ADAM, lora: LoraSpec | None = None, **settings: Any) -> RewriterAdapter:
    defaults = {"control_share": 0.0, "attempts": 4, "max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "ranking": "first"}
    return RewriterAdapter(
        LanguageModelSpec(path=str(folder), lora=lora), **(defaults | {"optimizer": optimizer, "device": "cpu"} | settings)
    )


def never(tasks: Sequence[Task]) -> list[float]:
    raise AssertionError("the critic was asked")


def iterate(adapter: RewriterAdapter, pool: TaskPool, key: str, accepted: str = GOOD) -> dict[str, float]:
    """All tasks fail; a proposal is accepted if its last word is `accepted`."""
    on_trial = {proposal.parent_id for proposal in pool.pending}
    feedback = [TaskFeedback(task, 0, 8, None) for task in pool.slots if task.id not in on_trial]
    for proposal in pool.pending:
        verdict: Verdict = "ACCEPT" if proposal.task.id.endswith(f">{accepted}") else "REJECT"
        feedback.append(TaskFeedback(proposal.task, 0, 8, None, decision=Decision(verdict, "")))
    pool.book(feedback)
    adapter.adapt(Words(), pool, feedback, never, key)
    return adapter.statistics()


def first_word(adapter: RewriterAdapter, word: str) -> float:
    """The probability that an answer begins with it."""
    loaded = adapter._load()
    ids = loaded.tokenizer(f"{PROMPT}\n\nAnswer:\n", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = loaded.model(input_ids=ids).logits[0, -1]
    return float(logits.softmax(-1)[loaded.tokenizer.convert_tokens_to_ids(word)])


def weights(adapter: RewriterAdapter) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in adapter._load().model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What answers earn


@pytest.mark.parametrize(
    ("rewards", "acceptance", "advantages"),
    [
        ([1, 0, 0, 0], 0.9, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),  # mean 1/4, std sqrt(3)/4
        ([0, 1], 0.9, [-1.0, 1.0]),  # mean 1/2, std 1/2
        ([0, 0, 0], 0.9, [0.0, 0.0, 0.0]),
        ([1, 1], 0.25, [0.0, 0.0]),
        ([1], 0.25, [0.75]),
        ([0], 0.25, [-0.25]),
        ([], 0.25, []),
    ],
)
def test_advantages_by_hand(rewards: list[float], acceptance: float, advantages: list[float]) -> None:
    assert rewrite_advantages(rewards, acceptance) == pytest.approx(advantages)


def test_the_running_mean_of_verdicts_by_hand() -> None:
    # With the prior of 1/2 as one verdict: (1/2 + 1) / 2, (1/2 + 1 + 0) / 3, (1/2 + 1 + 0 + 0) / 4; later ones weigh 1/20.
    mean, means = 0.5, []
    for verdicts, reward in enumerate([1.0, 0.0, 0.0]):
        mean = next_acceptance(mean, verdicts, reward)
        means.append(mean)
    assert means == pytest.approx([0.75, 0.5, 0.375])
    assert next_acceptance(0.4, 18, 1.0) == next_acceptance(0.4, 1000, 1.0) == pytest.approx(0.43)


def answered(ids: Sequence[int]) -> tuple[Completion, ...]:
    return tuple(Completion((token,), (), "", "EOS") for token in ids)


def test_answers_that_could_not_be_used_and_the_proposed_one_are_evidence() -> None:
    read = ((make("a"), "usable"), (None, "refused"), (make("b"), "usable"), (None, "repeated"), (None, "truncated"))
    asked = Asked("t", (7,), answered(range(5)), read)
    assert asked.evidence("b") == Question("t", (7,), "b", (Answer((1,), False), Answer((2,), True), Answer((4,), False)))
    for of_another in ("c", None):  # the environment's own variant was proposed, or nothing
        assert asked.evidence(of_another) == Question("t", (7,), None, (Answer((1,), False), Answer((4,), False)))


def test_every_reason_but_repetition_earns_nothing() -> None:
    assert {*REFUSALS} - EARNED_NOTHING == {"repeated"}
    assert {*REFUSALS} >= EARNED_NOTHING


class Scripted(RewriterAdapter):
    """The model's own draws are replaced by given words, an iteration's in each list; "..." does not end."""

    script: list[list[str]]

    def _answers(self, prompts: Sequence[str], keys: Sequence[str]) -> list[list[Completion]]:
        tokenizer = self._load().tokenizer
        answers = []
        for _ in prompts:
            texts = self.script.pop(0)
            ids = [tuple(tokenizer(text.removesuffix("..."), add_special_tokens=False).input_ids) for text in texts]
            ends = ["TRUNCATED" if text.endswith("...") else "EOS" for text in texts]
            end_id = tokenizer.eos_token_id
            tokens = [(*t, end_id) if end == "EOS" else t for t, end in zip(ids, ends, strict=True)]
            answers.append([Completion(t, (), x, e) for t, x, e in zip(tokens, texts, ends, strict=True)])  # type: ignore[arg-type]
        return answers


def scripted(folder: Path, *script: list[str], **settings: Any) -> Scripted:
    defaults = {"control_share": 0.0, "ranking": "first", "max_new_tokens": 3, "optimizer": ADAM, "device": "cpu"}
    adapter = Scripted(LanguageModelSpec(path=str(folder)), **(defaults | settings))
    adapter.script = list(script)
    return adapter


def learned(adapter: RewriterAdapter) -> dict[str, float]:
    return {name: adapter.statistics()[f"rewrite_{name}"] for name in LEARNED}


def booked(pool: TaskPool, *feedback: TaskFeedback) -> tuple[TaskFeedback, ...]:
    pool.book(feedback)
    return feedback


def verdict_on(pool: TaskPool, verdict: Verdict) -> tuple[TaskFeedback, ...]:
    (proposal,) = pool.pending
    return booked(pool, TaskFeedback(proposal.task, 4, 8, None, decision=Decision(verdict, "")))  # nothing to rewrite in it


@pytest.mark.parametrize(
    ("verdict", "script", "reward", "samples", "acceptance"),
    [
        ("ACCEPT", [GOOD, "task poor", "good...", "poor"], 1 / 3, 3.0, 0.75),  # 1, 0 and 0; the last one says nothing
        ("REJECT", [GOOD, "task poor", "good...", "poor"], 0.0, 0.0, 0.25),  # three times 0
        ("ACCEPT", [GOOD, "poor", GOOD], 1.0, 1.0, 0.75),  # a lone answer: 1 - 1/2
        ("REJECT", [GOOD, "poor", GOOD], 0.0, 1.0, 0.25),
    ],
)
def test_answers_wait_for_the_verdict_and_are_paid_then(
    folder: Path, verdict: Verdict, script: list[str], reward: float, samples: float, acceptance: float
) -> None:
    parent = make("a")
    pool = TaskPool([parent])
    adapter = scripted(folder, script)
    training = adapter.training
    assert training is not None
    before = weights(adapter)
    adapter.adapt(Words(), pool, booked(pool, TaskFeedback(parent, 0, 8, None)), never, "0")
    for key, undecided in (("1", "UNDECIDED"), ("2", "UNDECIDED")):
        assert [question.proposal_id for question in training.waiting] == ["a>good"]
        assert learned(adapter) == pytest.approx(
            dict(zip(LEARNED, (math.nan, 0.0, math.nan, math.nan), strict=True)), nan_ok=True
        )
        adapter.adapt(Words(), pool, verdict_on(pool, undecided), never, key)  # type: ignore[arg-type]
    assert same(weights(adapter), before)
    adapter.adapt(Words(), pool, verdict_on(pool, verdict), never, "3")
    found = learned(adapter)
    assert (found["reward"], found["samples"]) == pytest.approx((reward, samples))
    assert math.isnan(found["loss"]) == math.isnan(found["grad_norm"]) == (samples == 0)
    assert same(weights(adapter), before) == (samples == 0)
    assert (training.waiting, training.acceptance, training.verdicts) == ([], pytest.approx(acceptance), 1)
    adapter.adapt(Words(), pool, booked(pool), never, "4")
    assert learned(adapter)["samples"] == 0.0  # nobody is paid twice


def test_without_a_proposal_answers_are_compared_at_once(folder: Path) -> None:
    # One answer, refused: 0 - 1/2. Two of them are equal and teach nothing. Neither is a verdict.
    for script, samples in ((["task poor"], 1.0), (["task poor", "the"], 0.0)):
        parent = make("a")
        pool = TaskPool([parent])
        adapter = scripted(folder, script)
        before = weights(adapter)
        adapter.adapt(Words(), pool, booked(pool, TaskFeedback(parent, 0, 8, None)), never, "0")
        adapter.adapt(Words(), pool, booked(pool), never, "1")
        assert (learned(adapter)["reward"], learned(adapter)["samples"]) == (0.0, samples)
        assert same(weights(adapter), before) == (samples == 0)
        assert adapter.training is not None
        assert (adapter.training.acceptance, adapter.training.verdicts) == (0.5, 0)


def test_controls_and_the_environments_own_variants_never_count(folder: Path) -> None:
    class Varied(Words):
        def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> list[Task]:
            return [make(f"{task.id}+", task)]

    for settings, ids in (({"control_share": 0.999}, "a/unchanged-1"), ({"parametric_fallback": True}, "a+")):
        parent = make("a")
        pool = TaskPool([parent])
        adapter = scripted(folder, ["task poor", "the"], **settings)
        before = weights(adapter)
        adapter.adapt(Varied(), pool, booked(pool, TaskFeedback(parent, 0, 8, None)), never, "0")
        assert [proposal.task.id for proposal in pool.pending] == [ids]
        adapter.adapt(Varied(), pool, verdict_on(pool, "ACCEPT"), never, "1")
        assert learned(adapter)["samples"] == 0.0
        assert same(weights(adapter), before)
        assert adapter.training is not None
        assert adapter.training.verdicts == 0


# The update


def plain_logprob(adapter: RewriterAdapter, ids: Sequence[int], temperature: float) -> torch.Tensor:
    """Of each token of an answer, by the model as transformers calls it."""
    loaded = adapter._load()
    prompt = loaded.tokenizer(f"{PROMPT}\n\nAnswer:\n").input_ids
    logits = loaded.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("token_budget", [1, 4096])
def test_the_first_step_is_that_of_the_policy_gradient(folder: Path, token_budget: int) -> None:
    # Rewards 1, 0, 0: advantages sqrt(2), -sqrt(2)/2, -sqrt(2)/2; the loss is minus their mean as the ratio is 1.
    update = RewriterUpdateSettings(token_budget=token_budget, max_grad_norm=1e9)
    adapter = scripted(folder, [GOOD, "task poor", "odd good poor..."], optimizer=SGD, update=update, temperature=0.7)
    parent = make("a")
    pool = TaskPool([parent])
    adapter.adapt(Words(), pool, booked(pool, TaskFeedback(parent, 0, 8, None)), never, "0")
    assert adapter.training is not None
    (question,) = adapter.training.waiting
    parameters = dict(adapter._load().model.named_parameters())
    loss = torch.zeros(())
    for answer, advantage in zip(question.answers, (2**0.5, -(0.5**0.5), -(0.5**0.5)), strict=True):
        logprobs = plain_logprob(adapter, answer.token_ids, 0.7)
        assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)
        loss = loss - advantage * logprobs.mean() / 3
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    expected = {name: value.detach() - 0.5 * g for (name, value), g in zip(parameters.items(), gradients, strict=True)}
    adapter.adapt(Words(), pool, verdict_on(pool, "ACCEPT"), never, "1")
    assert learned(adapter)["loss"] == pytest.approx(0.0, abs=1e-6)
    assert learned(adapter)["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, value in weights(adapter).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in parameters.values())


def test_a_small_limit_of_the_norm_makes_a_small_step(folder: Path) -> None:
    adapter = scripted(folder, [GOOD, "task poor"], optimizer=SGD, update=RewriterUpdateSettings(max_grad_norm=0.01))
    before = weights(adapter)
    parent = make("a")
    pool = TaskPool([parent])
    adapter.adapt(Words(), pool, booked(pool, TaskFeedback(parent, 0, 8, None)), never, "0")
    adapter.adapt(Words(), pool, verdict_on(pool, "ACCEPT"), never, "1")
    moved = math.sqrt(sum(float((value - before[name]).square().sum()) for name, value in weights(adapter).items()))
    assert moved == pytest.approx(0.5 * 0.01, rel=1e-3)
    assert learned(adapter)["grad_norm"] > 0.01  # before clipping


def test_the_ratio_accounts_for_updates_while_answers_waited(folder: Path) -> None:
    """The loss of a lone rejected answer, A = -1/2, whose log-probs have moved by d: mean of ratio / 2 + 0.01 k3."""
    adapter = scripted(folder, ["poor"], update=RewriterUpdateSettings(clip_range=0.2))
    parent = make("a")
    pool = TaskPool([parent])
    adapter.adapt(Words(), pool, booked(pool, TaskFeedback(parent, 0, 8, None)), never, "0")
    assert adapter.training is not None
    (answer,) = adapter.training.waiting[0].answers
    with torch.no_grad():
        adapter._load().model.get_input_embeddings().weight[2:] += 0.02
        moved = plain_logprob(adapter, answer.token_ids, 0.8).tolist()
    d = [new - old for new, old in zip(moved, answer.logprobs, strict=True)]
    assert max(map(abs, d)) > 0.01
    expected = sum(0.5 * max(math.exp(x), 0.8) + 0.01 * (math.exp(-x) - 1 + x) for x in d) / len(d)
    adapter.adapt(Words(), pool, verdict_on(pool, "REJECT"), never, "1")
    assert learned(adapter)["loss"] == pytest.approx(expected, abs=1e-5)


def test_what_is_not_finite_names_the_tasks_and_leaves_the_weights(folder: Path) -> None:
    adapter = scripted(folder, [GOOD], [GOOD])
    before = weights(adapter)
    tasks = [make("a"), make("b")]
    pool = TaskPool(tasks)
    adapter.adapt(Words(), pool, booked(pool, *(TaskFeedback(task, 0, 8, None) for task in tasks)), never, "0")
    assert adapter.training is not None
    waiting = adapter.training.waiting
    spoiled = waiting[0].task_id
    question = Question(spoiled, waiting[0].prompt_ids, waiting[0].proposal_id, (Answer((5, 1), True, (math.nan, -1.0)),))
    adapter.training.waiting = [question, waiting[1]]
    adapter.training.settings = RewriterUpdateSettings(token_budget=1)  # each in its own forward pass
    feedback = [TaskFeedback(p.task, 0, 8, None, decision=Decision("ACCEPT", "")) for p in pool.pending]
    with pytest.raises(FloatingPointError, match=rf"rewriter is not finite \(loss nan.*tasks: {spoiled}$"):
        adapter.adapt(Words(), pool, booked(pool, *feedback), never, "1")
    assert same(weights(adapter), before)


# Learning


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize(("accepted", "seed"), [("poor", 0), ("poor", 1), (GOOD, 1), (GOOD, 2)])
def test_the_accepted_word_becomes_likely(folder: Path, lora: LoraSpec | None, accepted: str, seed: int) -> None:
    adapter = rewriter(folder, lora=lora)
    pool = TaskPool([make(name) for name in "abcdef"])
    before = first_word(adapter, accepted)
    rewards = [iterate(adapter, pool, f"{seed}/{i}", accepted)["rewrite_reward"] for i in range(25)]
    assert first_word(adapter, accepted) > before + 0.2  # .11 -> .6 and more, .24 -> .8 and more
    assert sum(rewards[-5:]) > sum(rewards[1:6]) + 0.5  # 0 to 1 -> 1.7 and more; nothing is known in the first iteration


def test_a_frozen_rewriter_has_nothing_of_this(folder: Path) -> None:
    adapter = rewriter(folder, optimizer=None)
    pool = TaskPool([make(name) for name in "abcdef"])
    before = weights(adapter)
    for i in range(4):
        statistics = iterate(adapter, pool, f"{i}")
    assert pool.accepted + pool.count("REJECT") > 0
    assert same(weights(adapter), before)
    assert (adapter.training, adapter.state()) == (None, {})
    assert {name for name in statistics if name.startswith("rewrite_")} == {f"rewrite_{name}" for name in COUNTED}


def test_names_are_the_same_every_time(folder: Path) -> None:
    adapter = rewriter(folder)
    pool = TaskPool([make(name) for name in "abcdef"])
    names = [set(adapter.statistics()), *(set(iterate(adapter, pool, f"{i}")) for i in range(3))]
    assert {f"rewrite_{name}" for name in (*COUNTED, *LEARNED)} <= names[0]
    assert names[1] == names[2] == names[3]  # the first lacks the quality of predictions


# Resume


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4, dropout=0.1)], ids=["full", "lora"])
def test_a_resumed_rewriter_goes_on_bit_for_bit(folder: Path, lora: LoraSpec | None) -> None:
    """Stopped after each of five iterations, once without a single one in between."""
    whole, pool = rewriter(folder, lora=lora), TaskPool([make(name) for name in "abcdef"])
    resumed, its_pool = rewriter(folder, lora=lora), TaskPool([make(name) for name in "abcdef"])
    for i in range(5):
        expected = iterate(whole, pool, f"{i}")
        assert iterate(resumed, its_pool, f"{i}") == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
        state = through_a_file(resumed.state())
        resumed, its_pool = rewriter(folder, lora=lora), TaskPool.from_state(its_pool.state())
        resumed.load_state(state)
        if i == 2:
            state = through_a_file(resumed.state())  # before its model is there
            resumed = rewriter(folder, lora=lora)
            resumed.load_state(state)
    assert whole.training is not None
    assert whole.training.verdicts > 0
    assert whole.training.waiting
    assert same(weights(whole), weights(resumed))
    assert not same(weights(whole), weights(rewriter(folder, lora=lora)))
    assert pool.state() == its_pool.state()
    if lora is not None:
        assert all("lora_" in name for name in state["model"]["weights"])


def test_a_state_replaces_what_was_learned_since(folder: Path) -> None:
    adapter = rewriter(folder)
    states, after = [through_a_file(adapter.state())], [weights(adapter)]
    pool = TaskPool([make(name) for name in "abcdef"])
    for i in range(4):
        iterate(adapter, pool, f"{i}")
    states, after = [*states, through_a_file(adapter.state())], [*after, weights(adapter)]
    for i in range(4, 8):
        iterate(adapter, pool, f"{i}")
    assert not same(weights(adapter), after[1])
    for state, expected in zip(states, after, strict=True):  # the first is of a model that was not there yet
        adapter.load_state(state)
        assert same(weights(adapter), expected)


def test_states_that_do_not_fit_are_refused(folder: Path) -> None:
    trained, frozen, other = rewriter(folder), rewriter(folder, optimizer=None), ParametricAdapter()
    pool = TaskPool([make(name) for name in "abcdef"])
    for i in range(3):
        iterate(trained, pool, f"{i}")
    state = trained.state()
    for adapter in (frozen, other):
        adapter.load_state({})
        with pytest.raises(ConfigError, match=r"the checkpoint's run trained its rewriter: go on with its own data\.adapter"):
            adapter.load_state(state)
    with pytest.raises(ConfigError, match=r"did not train the rewriter: set data\.adapter\.init_args\.optimizer to null"):
        trained.load_state({})
    adapted = rewriter(folder, lora=LoraSpec(rank=2))
    adapted.load_state(state)
    with pytest.raises(ConfigError, match="checkpoint of another architecture: it has no 'base_model"):
        iterate(adapted, pool, "3")


# Settings


def test_what_cannot_be_trained_is_refused(folder: Path) -> None:
    spec = LanguageModelSpec(path=str(folder))
    with pytest.raises(ConfigError, match="a rewriter on the policy's base cannot be trained: set its optimizer to null"):
        RewriterAdapter(None, optimizer=ADAM)
    with pytest.raises(ConfigError, match="a rewriter behind a server cannot be trained: set its optimizer to null"):
        RewriterAdapter(spec, server=OpenAIServer("http://127.0.0.1:9/v1", "writer"), optimizer=ADAM)
    with pytest.raises(ConfigError, match="a trained rewriter needs a temperature above 0"):
        RewriterAdapter(spec, temperature=0.0, optimizer=ADAM)
    with pytest.raises(ConfigError, match=r"optimizer is null, so its model\.lora must be null, got LoraSpec\(rank=2"):
        RewriterAdapter(LanguageModelSpec(path=str(folder), lora=LoraSpec(rank=2)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"update_epochs": 0}, "update_epochs must be at least 1, got 0"),
        ({"token_budget": 0}, "token_budget must be at least 1, got 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, got 0.0"),
        ({"clip_range": -0.1}, "clip_range must be positive, got -0.1"),
        ({"kl_coef": -1.0}, "kl_coef must not be negative, got -1.0"),
    ],
)
def test_updates_that_cannot_work_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"the rewriter's {message}"):
        RewriterUpdateSettings(**setting)


def test_yaml_names_the_optimizer_and_the_update(folder: Path) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--adapter", type=TaskAdapter | None)
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-5}}
    settings = {"model": {"path": str(folder), "lora": {"rank": 2}}, "optimizer": optimizer, "update": {"kl_coef": 0.1}}
    config = {"class_path": "rla_lightning.curriculum.rewriter.RewriterAdapter", "init_args": settings}
    adapter = parser.instantiate_classes(parser.parse_object({"adapter": config})).adapter
    assert adapter.training.settings == RewriterUpdateSettings(kl_coef=0.1)
    made = adapter.training.factory([nn.Parameter(torch.zeros(1))])
    assert isinstance(made, torch.optim.AdamW)
    assert made.param_groups[0]["lr"] == 1e-5


# Two processes


def _train(rank: int, folder: Path) -> str:
    adapter = rewriter(folder)
    pool = TaskPool([make(name) for name in "abcdef"])
    found = [iterate(adapter, pool, f"{i}")["rewrite_samples"] for i in range(4)]
    assert adapter.training is not None
    return f"{found} {adapter.statistics()['rewrite_loss']} {sorted(p.task.id for p in pool.pending)} {adapter._loaded is None}"


def _rank(rank: int, store: str, folder: Path, report: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    Path(f"{report}-{rank}").write_text(_train(rank, folder))
    dist.destroy_process_group()


def test_the_first_process_trains_for_all(folder: Path, tmp_path: Path) -> None:
    alone = _train(0, folder)
    fork = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "store"), folder, str(tmp_path / "report"))
    workers = [fork.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0, 0]
    reports = [(tmp_path / f"report-{rank}").read_text() for rank in range(2)]
    assert reports == [alone, alone.removesuffix("False") + "True"]  # the second has no model
