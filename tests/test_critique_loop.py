"""Closed loops in which a language model writes the critiques: the judge or the rewriter, in this process or served."""

import csv
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import distributed as dist

from rla_lightning.curriculum.adapters import ParametricAdapter
from rla_lightning.curriculum.proposing import TaskAdapter
from rla_lightning.curriculum.rewriter import RewriterAdapter
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.feedback import criticise
from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.specs import LanguageModelSpec, TinySpec, ValueModelSpec
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.formats_paper import PaperJudgeFormat
from rla_lightning.rollout.servers.openai import OpenAIServer
from rla_lightning.settings import CritiqueSettings, RolloutSettings
from rla_lightning.types import (
    LOST,
    WON,
    Completion,
    ConfigError,
    Decision,
    EpisodeLog,
    IterationResult,
    Observation,
    Task,
    TaskFeedback,
    Transition,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*")

TINY = TinySpec(width=16, layers=1, heads=2, mlp_width=32, context_length=32)
TEMPLATES = ("The rollout lost after 2 turns.", "4 of 4 rollouts won, in 1.0 turns on average.")
WORDS = (" slow", " lost", " late.", "\\boxed{1}", "\\boxed{-1}")  # what the random model mostly says
# Prompts of the corpus, so that a log is a few hundred tokens of the tokenizer that is trained on it.
CORPUS = ("An agent tried to solve a task in an environment and failed.", "Say in at most two sentences why the attempt failed.")


def door(kind: str, tag: str, parent: Task | None = None) -> Task:
    task_id = f"{kind}-{tag}"
    root, parent_id, version = (parent.root_id, parent.id, parent.version + 1) if parent else (task_id, None, 0)
    return Task(task_id, "doors", {"kind": kind, "tag": tag}, 0.5, root, parent_id, version)


class Doors(Environment):
    """An open door lets everybody pass, a wall nobody; what a rewriter makes of them is a door for some words."""

    name = "doors"

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}  # critiques by task

    def vocabulary(self):
        return (*"abcdef", "n1")

    def sample(self, rng, difficulty, split="in_domain"):
        return door(rng.choice(("open", "wall")), f"{split}-{rng.randrange(10**6)}")

    def start(self, task):
        return Visit(task)

    def describe(self, task):
        return "n1"

    def vary(self, task, direction, rng, number):
        return [door("some", f"{task.id}-varied", task)]

    def rewrite_prompt(self, task, direction, critique, successes, rollouts):
        self.asked[task.id] = critique
        return f"Make {task.id} {direction}. What was noticed: {critique}"

    def apply_rewrite(self, task, answer):
        return door("some", f"{task.id}-rewritten", task)


class Visit(Episode):
    max_turns = 2

    def __init__(self, task):
        self.kind = task.spec["kind"]
        self.turns = 0
        self.observation = Observation("n1")

    def step(self, action):
        self.turns += 1
        passes = self.kind == "open" or (self.kind == "some" and action[:1] in tuple("abc"))
        outcome = WON if passes else LOST if self.turns == 2 else None
        return Transition(self.observation, outcome is not None, outcome, action[:1] in tuple("abcdef"))


class Record(L.Callback):
    def __init__(self) -> None:
        self.results: list[IterationResult] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.results.append(outputs["result"])


def outside(result: IterationResult) -> list[TaskFeedback]:
    """Tasks that an iteration may ask rewrites of."""
    return [item for item in result.feedback if item.decision is None and item.successes / item.rollouts in (0, 1)]


def make_loop(environment: Doors, **options: Any) -> ClosedLoop:
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    models = {"policy": LanguageModelSpec(tiny=TINY), "critic": ValueModelSpec(tiny=TINY)}
    optimizers = {"policy_optimizer": adamw, "reward_model_optimizer": None, "critic_optimizer": adamw}
    rollout = RolloutSettings(group_size=4, max_new_tokens=2, max_judge_tokens=4, num_judgments=2)
    return ClosedLoop(environment, **{**models, **optimizers, "rollout": rollout, "judge_format": PaperJudgeFormat(), **options})


def make_data(environment: Doors, adapter: TaskAdapter | None) -> EnvironmentDataModule:
    return EnvironmentDataModule(environment, adapter, tasks_per_iteration=4, pool_size=8, validation_tasks=1, test_tasks=1)


def fit(loop: ClosedLoop, data: EnvironmentDataModule, folder: Path, epochs: int, resumed: Path | None = None) -> Record:
    record = Record()
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=CSVLogger(folder, name="", version=""), callbacks=[record],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1, log_every_n_steps=1, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(loop, data, ckpt_path=resumed, weights_only=False)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return record


def rows(folder: Path, column: str) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row.get(column)]
    return [{name: float(value) for name, value in row.items() if value and not name.startswith("time/")} for row in found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, random_qwen) -> Path:
    return random_qwen(tmp_path_factory.mktemp("qwen"), CORPUS, WORDS)


def reply(body: dict) -> str:
    prompt = body["prompt"]
    if "You review one step" in prompt:
        return "\\boxed{1}"
    if "why the attempt failed" in prompt:
        return f"<think>Hm.</think>It hit a wall {'twice' if body['seed'] % 2 else 'again'}. It did not stop. More."
    if "what made the task easy" in prompt:
        return "Any word opens the door."
    if "Sum them up" in prompt:
        return "It hit the wall in every attempt."
    return "as you like"


def test_a_served_judge_writes_what_the_pool_keeps_and_the_rewriter_reads(
    completions_server: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    url, asked = completions_server(reply)
    environment, server, served = Doors(), OpenAIServer(url, "judge"), LanguageModelSpec(path=str(model), weights=False)
    loop = make_loop(environment, reward_model=served, judge_sampler=server, critiques=CritiqueSettings("reward_model"))
    rewriter = RewriterAdapter(served, attempts=1, max_new_tokens=16, ranking="first", control_share=0.0, server=server)
    data = make_data(environment, rewriter)
    (result,) = fit(loop, data, tmp_path, 1).results
    said = {"It hit the wall in every attempt.", "It hit a wall twice. It did not stop.", "It hit a wall again. It did not stop."}
    assert len(outside(result)) == len(data.pool.pending) == 4  # all of them
    for item in outside(result):
        expected = {"Any word opens the door."} if item.successes else said
        (critique,) = item.critiques
        assert critique in expected
        assert item.logs == ()
        (proposal,) = [proposal for proposal in data.pool.pending if proposal.parent_id == item.task.id]
        assert proposal.critique == critique == data.pool.record(proposal.task.id).critique == environment.asked[item.task.id]
        assert any(f"What was noticed: {critique}" in body["prompt"] for body in asked)
    (row,) = rows(tmp_path, "critique/written")
    walls = sum(item.successes == 0 for item in outside(result))
    assert [row[f"critique/{name}"] for name in ("written", "fallbacks", "unasked", "empty", "truncated")] == [4, 0, 0, 0, 0]
    assert 0 < walls < 4
    questions = [body for body in asked if "Answer with these sentences only." in body["prompt"]]
    assert sum("why the attempt failed" in body["prompt"] for body in questions) == 4 * walls
    assert sum("what made the task easy" in body["prompt"] for body in questions) == 4 - walls
    assert {(body["max_tokens"], body["temperature"]) for body in questions} == {(256, 1.0)}
    assert row["critique/tokens"] > 0
    generated = sum(group.generated_tokens for group in result.groups)
    (adapted,) = rows(tmp_path, "env/rewrite_tokens")
    assert int(loop.tokens_generated) == generated + row["critique/tokens"] + adapted["env/rewrite_tokens"]


def with_judge(model: Path, **options: Any) -> tuple[ClosedLoop, EnvironmentDataModule]:
    """A trained judge of this process, which writes critiques besides its votes."""
    environment = Doors()
    critiques = CritiqueSettings("reward_model", max_rollouts=2, max_new_tokens=12)
    judge = {"reward_model": LanguageModelSpec(path=str(model)), "reward_model_optimizer": partial(torch.optim.AdamW, lr=1e-3)}
    loop = make_loop(environment, critiques=critiques, **judge, **options)
    return loop, make_data(environment, ParametricAdapter(ranking="random", candidates=1, control_share=0.0))


def test_the_judge_of_this_process_writes_and_a_resumed_run_goes_on_as_if_nothing_happened(model: Path, tmp_path: Path) -> None:
    whole, half, again = tmp_path / "whole", tmp_path / "half", tmp_path / "again"
    loop, data = with_judge(model)
    results = fit(loop, data, whole, 3).results
    fit(*with_judge(model), half, 2)
    resumed_loop, resumed = with_judge(model)
    fit(resumed_loop, resumed, again, 3, half / "2.ckpt")
    assert data.pool.state() == resumed.pool.state()
    assert int(loop.tokens_generated) == int(resumed_loop.tokens_generated)
    counted = rows(whole, "critique/written")
    assert len(counted) == 3
    names = [f"critique/{name}" for name in ("written", "fallbacks", "unasked", "empty", "truncated", "tokens")]
    assert [counted[2][name] for name in names] == [rows(again, "critique/written")[-1][name] for name in names]
    for row, result in zip(counted, results, strict=True):
        tasks = row["critique/written"] + row["critique/fallbacks"]
        on_trial = {item.task.parent_id for item in result.feedback if item.verdict == "UNDECIDED"}
        assert tasks == len([item for item in outside(result) if item.task.id not in on_trial])
        assert row["critique/unasked"] == 0
    assert sum(row["critique/written"] for row in counted) > 0
    critiques = [record.critique for record in data.pool.records if record.critique]
    written = [critique for critique in critiques if not critique.startswith(TEMPLATES)]
    assert written
    assert all(set(critique) <= set(" slow lost late. \\boxed{1}-") for critique in written)
    assert all(len(critique) <= 600 and critique.count(". ") <= 1 for critique in written)


def test_the_rewriter_writes_critiques_before_it_rewrites(model: Path, tmp_path: Path) -> None:
    environment = Doors()
    spec = LanguageModelSpec(path=str(model))
    loop = make_loop(environment, reward_model=spec, critiques=CritiqueSettings("rewriter", max_rollouts=1))
    rewriter = RewriterAdapter(
        spec, attempts=2, max_new_tokens=24, ranking="first", control_share=0.0, max_proposals=2, device="cpu"
    )
    data = make_data(environment, rewriter)
    (result,) = fit(loop, data, tmp_path, 1).results
    assert len(outside(result)) == 4
    assert all(len(item.logs) == 1 for item in outside(result))
    (row,) = rows(tmp_path, "env/critique_written")
    assert row["env/critique_written"] + row["env/critique_fallbacks"] == 2  # not for tasks that there is no room for
    assert row["env/critique_written"] > 0
    pending = data.pool.pending
    assert {proposal.critique for proposal in pending} <= set(environment.asked.values())
    assert sum(not critique.startswith(TEMPLATES) for critique in environment.asked.values()) == row["env/critique_written"]
    generated = sum(group.generated_tokens for group in result.groups)
    assert row["env/critique_tokens"] > 0
    assert row["env/rewrite_tokens"] > 0
    assert int(loop.tokens_generated) == generated + row["env/critique_tokens"] + row["env/rewrite_tokens"]


def test_templates_are_the_default_and_bring_no_logs(model: Path, tmp_path: Path) -> None:
    environment = Doors()
    loop = make_loop(environment, reward_model=LanguageModelSpec(path=str(model)))
    data = make_data(environment, ParametricAdapter(ranking="random", candidates=1, control_share=0.0))
    (result,) = fit(loop, data, tmp_path, 1).results
    assert all(item.logs == () and item.critiques[0].startswith(TEMPLATES) for item in outside(result))
    (row,) = rows(tmp_path, "rollout/success_rate")
    assert not [name for name in row if name.startswith("critique/")]


def test_settings_that_contradict_each_other_are_refused(model: Path, tmp_path: Path) -> None:
    environment, judge = Doors(), LanguageModelSpec(path=str(model))
    with pytest.raises(ConfigError, match=r"critiques\.writer is reward_model, but model\.reward_model\.path is null"):
        make_loop(environment, critiques=CritiqueSettings("reward_model"))
    with pytest.raises(ConfigError, match="writer must be one of template, reward_model, rewriter, got 'poet'"):
        CritiqueSettings("poet")  # type: ignore[arg-type]
    for name in ("max_rollouts", "max_new_tokens"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
            CritiqueSettings(**{name: 0})
    cases = [
        (CritiqueSettings("rewriter"), ParametricAdapter(), r"writer is rewriter, but data\.adapter is ParametricAdapter"),
        (CritiqueSettings("rewriter"), None, r"writer is rewriter, but data\.adapter null reads none"),
        (CritiqueSettings("reward_model"), None, r"writer is reward_model, but data\.adapter null reads none"),
        (CritiqueSettings("reward_model", max_new_tokens=16384), ParametricAdapter(), "max_new_tokens 16384 leaves no room"),
    ]
    for critiques, adapter, message in cases:
        loop = make_loop(environment, reward_model=judge, critiques=critiques)
        with pytest.raises(ConfigError, match=message):
            fit(loop, make_data(environment, adapter), tmp_path, 1)


# Two processes


class Echo:
    """Says the key it was given and notes how often it was asked."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def sample(self, prompts: Sequence[Sequence[int]], n: int, params: object, keys: Sequence[str]) -> list[list[Completion]]:
        self.calls.append(len(prompts))
        return [[Completion((1, 2), (), f"Said of {key}.", "EOS")] for key in keys]


def item(name: str, has_logs: bool = True, decision: Decision | None = None, parent: str | None = None) -> TaskFeedback:
    logs = (EpisodeLog(("[0] n1",), False, "DONE"),) if has_logs else ()
    return TaskFeedback(Task(name, "doors", {}, 0.5, name, parent), 0, 4, None, ("why",), decision=decision, logs=logs)


FEEDBACK = [item("a"), item("b"), item("c"), item("b+", False, Decision("UNDECIDED", ""), "b"), item("d"), item("e", False)]


def criticised() -> tuple[str, list[int]]:
    loaded = load_language_model(LanguageModelSpec(tiny=replace(TINY, context_length=512)), Doors().vocabulary(), "judge")
    players: Any = SimpleNamespace(judge_sampler=Echo(), reward_model=loaded, settings=RolloutSettings())
    feedback, counts = criticise(FEEDBACK, players, CritiqueSettings(), "k")
    return repr(([(f.task.id, f.critiques, f.logs) for f in feedback], counts)), players.judge_sampler.calls


def _rank(rank: int, store: str, report: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    text, calls = criticised()
    Path(f"{report}-{rank}").write_text(f"{text}\n{calls}")
    dist.destroy_process_group()


def test_each_process_writes_its_share_and_all_have_the_same(tmp_path: Path) -> None:
    alone, calls = criticised()
    assert calls == [3]
    assert "('a', ('Said of k/critique/a/0.',), ())" in alone
    assert "('b', ('why',), ())" in alone  # its rewrite is still on trial
    assert "('e', ('why',), ())" in alone
    assert "'critique/written': 3.0" in alone
    assert "'critique/tokens': 6.0" in alone
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_rank, args=(rank, str(tmp_path / "store"), str(tmp_path / "report"))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0, 0]
    reports = [(tmp_path / f"report-{rank}").read_text().split("\n") for rank in range(2)]
    assert reports == [[alone, "[2]"], [alone, "[1]"]]
