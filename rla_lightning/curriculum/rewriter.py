"""Rewrites written by a language model: it is asked about every task outside the band, several times each.

With `model.critiques.writer` rewriter it reads logs of rollouts first and says what was wrong with the task.

What it is asked and how its answers are read is the environment's business (`rewrite_prompt`, `apply_rewrite`). An
answer that is no valid new task is counted by its reason and proposes nothing. The model is frozen, or with an optimizer
learns from the verdicts on its proposals (`rewriter_training`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from rla_lightning.curriculum.adapters import usable_variants
from rla_lightning.curriculum.critiques import Writer, joined, total, with_critique, write_critiques
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.prediction import PREDICTORS
from rla_lightning.curriculum.proposing import Predict, ProposingAdapter, Request
from rla_lightning.curriculum.rewriter_training import Asked, RewriterTraining, RewriterUpdateSettings
from rla_lightning.distributed import failing_together, from_first, rank
from rla_lightning.environments.base import Environment
from rla_lightning.models.language_model import LoadedModel, load_language_model
from rla_lightning.models.specs import LanguageModelSpec
from rla_lightning.rollout.formats_paper import render
from rla_lightning.rollout.servers.openai import OpenAIServer
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import Completion, ConfigError, SamplingParams, Task, TaskFeedback

logger = logging.getLogger(__name__)

FALLBACK_VARIANTS = 24  # asked of the environment per task
REFUSALS = (
    "truncated",  # max_new_tokens reached before the end
    "refused",  # by the environment: unreadable, unchanged or against its rules
    "unchanged",  # the task itself
    "known",  # seen before in this run, or held out
    "invalid",
    "resembling",  # nearly the same as an earlier or held-out task
    "repeated",  # an earlier attempt gave the same task
    "failed",  # the environment raised an error
)
COUNTED = (
    "tasks",  # outside the band, in line and with room for a proposal
    "unasked",  # of these: the environment has no question about the task, or it is too long for the context
    "answers",  # = usable + all refusals
    "tokens",  # of all answers
    "usable",
    *REFUSALS,
    "fallbacks",  # tasks whose candidates came from the environment instead
    "without",  # tasks that ended without any candidate
)


class RewriterAdapter(ProposingAdapter):
    """Proposes, for each task outside the band, a rewrite by a language model (paper: Qwen3-4B, frozen).

    What a trained one has learned, and what waits for verdicts, is part of the datamodule's state.
    """

    def __init__(
        self,
        model: LanguageModelSpec | None = None,
        attempts: int = 8,
        temperature: float = 0.8,
        top_p: float = 0.95,
        max_new_tokens: int = 2048,
        low: float = 0.2,
        high: float = 0.8,
        target: float = 0.5,
        max_proposals: int | None = None,
        ranking: Literal["critic", "knobs", "both", "first"] = "critic",
        control_share: float = 0.1,
        parametric_fallback: bool = False,
        device: str = "auto",
        offload: bool = True,
        sampler_tokens: int = 32768,
        server: OpenAIServer | None = None,
        optimizer: OptimizerCallable | None = None,
        update: RewriterUpdateSettings = RewriterUpdateSettings(),  # noqa: B008 (frozen, so that YAML shows every key)
    ) -> None:
        """Configure who rewrites and when.

        Args:
            model: the rewriter, pretrained. Under several processes only the first one loads it. null: the base that the policy
                adds its adapters to.
            attempts: answers drawn per task, all in one batch.
            temperature: of the answers, 0 makes all attempts equal.
            top_p: nucleus filter, 1 switches it off.
            max_new_tokens: limit of one answer, thinking included; a longer one is refused.
            low: a success rate below it asks for an easier task.
            high: a success rate above it asks for a harder task.
            target: wanted success rate of the chosen rewrite.
            max_proposals: most proposals pending at a time; null: no limit.
            ranking: what predicts the success of the valid answers, the critic, a regression on the tasks' knobs or both; first
                takes the first one (paper).
            control_share: of the requests that get the task itself, unchanged, as their proposal: how many of these are
                accepted is the run's false-accept rate.
            parametric_fallback: where no answer is valid, choose among the environment's own variants.
            device: that the rewriter runs on; auto: the current GPU if there is one, else the CPU. The policy's base stays
                where it is.
            offload: keep its weights in the CPU's memory while it is not used; likewise.
            sampler_tokens: most tokens (prompts and answers, padded) decoded in one batch.
            server: that writes in place of this process, which then loads the model's tokenizer only; null: none.
            optimizer: of the rewriter, which then learns to have its proposals accepted: of its adapters where model.lora is
                set (recommended), else of all weights, which should be float32 then. null freezes it (paper).
            update: how it is trained, if it is.
        """
        if ranking not in ("first", *PREDICTORS):
            raise ConfigError(f"the rewriter's ranking must be one of first, {', '.join(PREDICTORS)}, got '{ranking}'")
        super().__init__(low, high, target, max_proposals, None if ranking == "first" else ranking, "target", control_share)
        if model is not None and model.base != "own":
            raise ConfigError("the rewriter shares the policy's base where its model is null, not where its model.base is policy")
        if model is not None and model.path is None:
            raise ConfigError("the rewriter needs a pretrained model: set its model.path, got null")
        if optimizer is None and model is not None and model.lora is not None:
            raise ConfigError(f"the rewriter's optimizer is null, so its model.lora must be null, got {model.lora}")
        if server is not None and model is None:
            raise ConfigError("a server writes the rewrites: the rewriter's model.path must name its tokenizer, got null")
        if model is not None and not model.weights and server is None:
            raise ConfigError("the rewriter's model.weights is false: set its server")
        if optimizer is not None and (model is None or server is not None):
            where = "on the policy's base" if model is None else "behind a server"
            raise ConfigError(f"a rewriter {where} cannot be trained: set its optimizer to null")
        if optimizer is not None and temperature == 0:
            raise ConfigError("a trained rewriter needs a temperature above 0: equal answers cannot be compared")
        for name, value in (("attempts", attempts), ("max_new_tokens", max_new_tokens), ("sampler_tokens", sampler_tokens)):
            if value < 1:
                raise ConfigError(f"the rewriter's {name} must be at least 1, got {value}")
        if temperature < 0:
            raise ConfigError(f"the rewriter's temperature must not be negative, got {temperature}")
        if not 0 < top_p <= 1:
            raise ConfigError(f"the rewriter's top_p must be in (0, 1], got {top_p}")
        self.model = model if model is None or server is None else replace(model, weights=False)
        self.server = server
        self.attempts = attempts
        self.params = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
        self.parametric_fallback = parametric_fallback
        self.device = _device(device)
        self.offload = offload
        self.sampler_tokens = sampler_tokens
        self.training = None if optimizer is None else RewriterTraining(optimizer, update, temperature)
        self._loaded: LoadedModel | None = None
        self._counts: Counter[str] = Counter()
        self._critiques = total(())

    def statistics(self) -> dict[str, float]:
        counts = {f"rewrite_{name}": float(self._counts[name]) for name in COUNTED}
        if self.training is not None:
            counts |= {f"rewrite_{name}": value for name, value in self.training.learned.items()}
        return super().statistics() | counts | {f"critique_{name}": number for name, number in self._critiques.items()}

    def check(self, environment: Environment) -> None:
        if type(environment).rewrite_prompt is Environment.rewrite_prompt:
            raise ConfigError(
                f"environment '{environment.name}' has no rewrite_prompt, so a language model cannot rewrite its tasks: "
                "use rla_lightning.curriculum.adapters.ParametricAdapter"
            )
        if self.parametric_fallback and type(environment).vary is Environment.vary:
            raise ConfigError(f"environment '{environment.name}' has no vary to fall back on: set parametric_fallback to false")

    def lend(self, policy: LoadedModel) -> None:
        if self.model is not None:
            return
        if policy.bare is None or not policy.bare.name_or_path:
            raise ConfigError(
                "the rewriter's model is null, but the policy has no pretrained base that stays frozen: "
                "set model.policy.path and model.policy.lora"
            )
        self._loaded = self._with_room(replace(policy, model=policy.bare))

    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        self._counts.clear()
        self._critiques = total(())
        if self.training is not None:
            self.training.learn(pool, self._ready, f"{key}/rewriter")
        super().adapt(environment, pool, feedback, predict, key)
        if self.training is not None:
            self.training.await_verdicts(pool, self._ready)

    def state(self) -> dict[str, Any]:
        return super().state() if self.training is None else self.training.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self.training is None:
            super().load_state(state)
        elif not state:
            raise ConfigError("the checkpoint's run did not train the rewriter: set data.adapter.init_args.optimizer to null")
        else:
            self.training.load_state(state)
            self._loaded = None  # its weights are those of another run: build it anew

    def _requests(self, pool: TaskPool, feedback: Sequence[TaskFeedback], key: str) -> list[Request]:
        """With the model's own critiques of tasks that it will be asked about first, if their logs came with the feedback."""
        requests = super()._requests(pool, feedback, key)
        by_task = {item.task.id: item for item in feedback if item.logs}
        room = len(requests) if self.max_proposals is None else max(0, self.max_proposals - len(pool.pending))
        asked = [request.parent.task.id for request in requests[:room] if not request.is_control]
        chosen = [by_task[task_id] for task_id in asked if task_id in by_task]
        if not chosen:
            return requests
        written = []
        with failing_together():
            if rank() == 0:
                written = write_critiques(chosen, self._writer(), key)
        written = from_first(written)
        self._critiques = total(written)
        texts = {item.task.id: joined(with_critique(item, text).critiques) for item, text in zip(chosen, written, strict=True)}
        return [replace(request, critique=texts.get(request.parent.task.id, request.critique)) for request in requests]

    def _candidates(
        self, environment: Environment, pool: TaskPool, requests: Sequence[Request], key: str
    ) -> list[tuple[Task, ...]]:
        candidates: list[tuple[Task, ...]] = []
        counts: Counter[str] = Counter()
        with failing_together():
            if rank() == 0:
                candidates, counts = self._written(environment, pool, requests, key)
        candidates, counts = from_first((candidates, counts))
        self._counts.update(counts)
        return candidates

    def _written(
        self, environment: Environment, pool: TaskPool, requests: Sequence[Request], key: str
    ) -> tuple[list[tuple[Task, ...]], Counter[str]]:
        """The candidates of each request in the order of the attempts, and what became of the answers."""
        prompts = {i: prompt for i, request in enumerate(requests) if (prompt := _question(environment, request)) is not None}
        keys = [f"{key}/rewrite/{requests[i].parent.task.id}" for i in prompts]
        answers = dict(zip(prompts, self._answers(list(prompts.values()), keys), strict=True))
        counts = Counter(tasks=len(requests))
        candidates = []
        for i, request in enumerate(requests):
            completions = answers.get(i) or []
            counts["unasked"] += not completions
            counts["answers"] += len(completions)
            counts["tokens"] += sum(len(completion.token_ids) for completion in completions)
            read = _read(environment, pool, request.parent.task, completions)
            counts.update(reason for _, reason in read)
            usable = tuple(task for task, _ in read if task is not None)
            if self.training is not None and completions:
                prompt_ids = render(self._load().tokenizer, prompts[i])
                self.training.asked.append(Asked(request.parent.task.id, prompt_ids, tuple(completions), read))
            if not usable and self.parametric_fallback:
                usable = usable_variants(environment, pool, request, FALLBACK_VARIANTS, key)
                counts["fallbacks"] += bool(usable)
            counts["without"] += not usable
            candidates.append(usable)
        return candidates, counts

    def _answers(self, prompts: Sequence[str], keys: Sequence[str]) -> list[list[Completion]]:
        """`attempts` answers to each prompt, none to one that leaves no room for an answer."""
        if not prompts:
            return []
        loaded = self._load()
        rendered = [render(loaded.tokenizer, prompt) for prompt in prompts]
        room = loaded.context_length - self.params.max_new_tokens
        fitting = [i for i, prompt in enumerate(rendered) if len(prompt) <= room]
        for i in sorted(set(range(len(prompts))).difference(fitting)):
            logger.warning("%s: a prompt of %d tokens is too long for the rewriter (%d)", keys[i], len(rendered[i]), room)
        drawn = self._draw([rendered[i] for i in fitting], [keys[i] for i in fitting], self.attempts)
        by_index = dict(zip(fitting, drawn, strict=True))
        return [by_index.get(i, []) for i in range(len(prompts))]

    def _writer(self) -> Writer:
        loaded = self._load()
        room = loaded.context_length - self.params.max_new_tokens
        return Writer(loaded.tokenizer, room, lambda prompts, keys: [drawn[0] for drawn in self._draw(prompts, keys, 1)])

    def _draw(self, prompts: Sequence[tuple[int, ...]], keys: Sequence[str], number: int) -> list[list[Completion]]:
        """That many answers to each prompt, from the server or the model."""
        loaded = self._load()
        if self.server is not None:
            return self.server.sampler(loaded.tokenizer).sample(prompts, number, self.params, keys)
        with self._placed(loaded):
            sampler = TransformersSampler(loaded.model, loaded.tokenizer, self.sampler_tokens)
            return sampler.sample(prompts, number, self.params, keys)

    def _load(self) -> LoadedModel:
        if self._loaded is None:
            assert self.model is not None  # or the policy's base was lent
            self._loaded = self._with_room(load_language_model(self.model, (), "rewriter"))
            if self.training is not None:
                self.training.attach(self._loaded, self.model.compile)
        return self._loaded

    def _with_room(self, loaded: LoadedModel) -> LoadedModel:
        if self.params.max_new_tokens >= loaded.context_length:
            raise ConfigError(
                f"the rewriter's max_new_tokens {self.params.max_new_tokens} leaves no room for a prompt "
                f"in its context of {loaded.context_length} tokens"
            )
        return loaded

    def _ready(self) -> AbstractContextManager[None]:
        return self._placed(self._load())

    @contextmanager
    def _placed(self, loaded: LoadedModel) -> Iterator[None]:
        """The model on its device inside, and afterwards in the CPU's memory if it is to be offloaded."""
        device = self.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model: nn.Module = loaded.model
        if self.model is None:
            device = next(model.parameters()).device
        model.to(device)  # of the policy's base all but buffers is there
        try:
            yield
        finally:
            if self.model is not None and self.offload and device.type != "cpu":
                model.to("cpu")
                if device.type == "cuda":
                    torch.cuda.empty_cache()  # for the other models, which share the device


def _device(name: str) -> torch.device | None:
    if name == "auto":
        return None
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"the rewriter's device {name!r} is neither auto nor a device of torch") from error


def _question(environment: Environment, request: Request) -> str | None:
    parent = request.parent
    try:
        return environment.rewrite_prompt(parent.task, request.direction, request.critique, parent.successes, parent.rollouts)
    except Exception as error:  # of somebody's environment: the task stays as it is, the run goes on
        logger.warning("no question about task %s: %s: %s", parent.task.id, type(error).__name__, error)
        return None


def _read(
    environment: Environment, pool: TaskPool, parent: Task, completions: Sequence[Completion]
) -> tuple[tuple[Task | None, str], ...]:
    """Of each answer the task that it stands for, if it can be used, and what becomes of it."""
    usable: set[str] = set()
    read: list[tuple[Task | None, str]] = []
    for completion in completions:
        task, reason = _judge(environment, pool, parent, completion)
        if task is not None and task.id in usable:
            task, reason = None, "repeated"
        if task is not None:
            usable.add(task.id)
        read.append((task, reason))
    return tuple(read)


def _judge(environment: Environment, pool: TaskPool, parent: Task, completion: Completion) -> tuple[Task | None, str]:
    """The task that an answer stands for if it can be used, and "usable" or why it cannot."""
    if completion.stop_reason == "TRUNCATED":  # a box in unfinished thoughts is no answer
        return None, "truncated"
    problem: str | None = None
    resembles = False
    try:
        task = environment.apply_rewrite(parent, completion.text)
        if isinstance(task, Task) and not pool.knows(task.id):
            resembles = environment.resembles(task, [record.task for record in pool.records])
            problem = None if resembles else environment.validate(task, parent)
    except Exception as error:  # of somebody's environment: one answer is lost, the run goes on
        logger.warning("a rewrite of task %s failed: %s: %s", parent.id, type(error).__name__, error)
        return None, "failed"
    if isinstance(task, str):
        reason, problem = "refused", task
    elif pool.knows(task.id):
        reason = "unchanged" if task.id == parent.id else "known"
    elif resembles:
        reason = "resembling"
    elif problem is not None:
        reason = "invalid"
    else:
        return task, "usable"
    logger.info("a rewrite of task %s is %s: %s", parent.id, reason, problem or completion.text)
    return None, reason
