"""The only way anything generates text: the contract.

Sample j of prompt i is a function of (keys[i], j) and the prompt: which other prompts are answered at the same time
changes nothing but float noise in logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from rla_lightning.models.language_model import LoadedModel
from rla_lightning.types import Completion, ConfigError, SamplingParams


class Session(ABC):
    """Answers that come as they are ready, in conversations that go on.

    A ticket is a conversation with one open request at a time. Where its next prompt starts with its last one and the answer,
    what was read before is not read again, if that prompt is submitted before `completed` is next called.
    """

    @abstractmethod
    def submit(self, ticket: int, prompt: Sequence[int], key: str) -> None:
        """Ask for one answer; `key` seeds it."""

    @abstractmethod
    def completed(self) -> list[tuple[int, Completion]]:
        """Wait for answers: at least one with its ticket, or none when none is open."""


class Sampler(ABC):
    """Draws completions from one model."""

    @abstractmethod
    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, keys: Sequence[str]
    ) -> list[list[Completion]]:
        """Draw n completions of every prompt, in order; `keys[i]` seeds those of prompt i."""

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[Session]:
        """Conversations with one set of parameters; the weights must not change while it is open."""
        yield TurnByTurn(self, params)

    def update_weights(self, model: nn.Module) -> None:  # noqa: B027
        """Sample from the weights of `model` from now on; all ranks call it. Nothing to do where the model itself is used."""


class SamplerBackend(ABC):
    """Where a model is sampled from, as YAML names it by class_path; its constructor is the config."""

    @abstractmethod
    def build(self, loaded: LoadedModel, name: str) -> Sampler:
        """The sampler of a model that is on the CPU; all ranks call it.

        Args:
            loaded: the model as a run begins with it.
            name: of the model, for messages.
        """


class TurnByTurn(Session):
    """All open requests of any sampler, answered together."""

    def __init__(self, sampler: Sampler, params: SamplingParams) -> None:
        self.sampler, self.params = sampler, params
        self.open: dict[int, tuple[tuple[int, ...], str]] = {}

    def submit(self, ticket: int, prompt: Sequence[int], key: str) -> None:
        self.open[ticket] = (tuple(prompt), key)

    def completed(self) -> list[tuple[int, Completion]]:
        if not self.open:
            return []
        tickets, asked, self.open = list(self.open), list(self.open.values()), {}
        answers = self.sampler.sample([prompt for prompt, _ in asked], 1, self.params, [key for _, key in asked])
        return [(ticket, answer) for ticket, (answer,) in zip(tickets, answers, strict=True)]


def check_request(prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, keys: Sequence[str]) -> None:
    if n < 1:
        raise ConfigError(f"the number of samples per prompt must be at least 1, got {n}")
    if len(keys) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts need as many keys, got {len(keys)}")
    if params.temperature < 0 or params.max_new_tokens < 1 or params.top_k < 0 or not 0 < params.top_p <= 1:
        raise ConfigError(f"cannot sample with {params}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {i} (key {keys[i]!r}) is empty")
