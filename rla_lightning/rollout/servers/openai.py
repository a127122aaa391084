"""Sample a frozen model from any server that speaks OpenAI's interface: a rewriter or an external judge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedTokenizerBase

from rla_lightning.models.language_model import LoadedModel
from rla_lightning.rollout.sampler import Sampler, SamplerBackend
from rla_lightning.rollout.servers.client import Client, RemoteSampler, checked_url
from rla_lightning.types import Completion, ConfigError, SamplingParams, ServerError

Endpoint = Literal["completions", "chat"]
PATHS = {"completions": "/completions", "chat": "/chat/completions"}


class OpenAIServer(SamplerBackend):
    """A server with OpenAI's interface, for models that are never trained."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        endpoint: Endpoint = "completions",
        token_ids: bool = False,
        extra: dict[str, Any] | None = None,
        timeout_s: float = 120.0,
        retries: int = 5,
        concurrency: int = 16,
    ) -> None:
        """Configure who is asked and how patiently.

        Args:
            base_url: address up to the version, e.g. http://localhost:8000/v1.
            model: the name that the server knows the model by.
            api_key_env: environment variable that holds the key; null: none is sent.
            endpoint: `completions` sends the prompt as it is; `chat` sends its text without special tokens as one user
                message, for servers that have only that.
            token_ids: send the prompt's token ids, not its text: for servers that take them and have our tokenizer.
            extra: further fields of every request; null leaves out one that is sent otherwise, e.g. {seed: null}.
            timeout_s: longest silence of the server before a request counts as failed, and longest delay it may ask for.
            retries: further tries of a request after a lost connection, a timeout, or status 429 or 5xx.
            concurrency: most requests at a time.
        """
        self.base_url = checked_url(base_url, "base_url")
        if not model:
            raise ConfigError("model must be the name that the server knows the model by, got ''")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError(f"api_key_env names the environment variable {api_key_env!r}, which is not set")
        if endpoint not in PATHS:
            raise ConfigError(f"endpoint must be 'completions' or 'chat', got {endpoint!r}")
        if token_ids and endpoint == "chat":
            raise ConfigError("token_ids needs the endpoint 'completions': a chat message is text")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        if retries < 0:
            raise ConfigError(f"retries must not be negative, got {retries}")
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {concurrency}")
        self.model = model
        self.api_key_env = api_key_env
        self.endpoint = endpoint
        self.token_ids = token_ids
        self.extra = dict(extra or {})
        self.timeout_s = timeout_s
        self.retries = retries
        self.concurrency = concurrency

    def build(self, loaded: LoadedModel, name: str) -> Sampler:
        return self.sampler(loaded.tokenizer)

    def sampler(self, tokenizer: PreTrainedTokenizerBase) -> OpenAISampler:
        """The weights are the server's: only the tokenizer is needed here."""
        return OpenAISampler(self, tokenizer)


class OpenAISampler(RemoteSampler):
    """Its completions are text whose token ids are made here: good to read and to count, never to train on."""

    def __init__(self, server: OpenAIServer, tokenizer: PreTrainedTokenizerBase) -> None:
        key = os.environ[server.api_key_env] if server.api_key_env else None
        client = Client(server.base_url, server.timeout_s, server.retries, key)
        super().__init__(client, PATHS[server.endpoint], server.concurrency)
        self.server = server
        self.tokenizer = tokenizer

    def update_weights(self, model: nn.Module) -> None:
        raise ConfigError(
            f"the model {self.server.model!r} at {self.client.url} is frozen: its weights cannot be updated; "
            "a model that is trained needs a sampler that takes new weights"
        )

    def body(self, prompt: Sequence[int], seed: int, params: SamplingParams) -> dict[str, Any]:
        body = {
            "model": self.server.model,
            **self._prompt(prompt),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **({"top_k": params.top_k} if params.top_k else {}),  # not part of OpenAI's own interface
            "seed": seed >> 33,  # 31 bits: some servers keep seeds in a signed int
            **self.server.extra,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _prompt(self, prompt: Sequence[int]) -> dict[str, Any]:
        if self.server.token_ids:
            return {"prompt": list(prompt)}
        is_chat = self.server.endpoint == "chat"
        text = self.tokenizer.decode(list(prompt), skip_special_tokens=is_chat, clean_up_tokenization_spaces=False)
        return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}

    def read(self, answer: Any, params: SamplingParams) -> Completion:
        choice = self.only_choice(answer)
        text = self._text(choice)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if choice.get("finish_reason") != "stop":
            return Completion(tuple(ids), (), text, "TRUNCATED")
        return Completion((*ids, self.tokenizer.eos_token_id), (), text, "EOS")

    def _text(self, choice: dict[str, Any]) -> str:
        if self.server.endpoint == "completions":
            text = choice.get("text")
        else:
            message = choice.get("message")
            # Null where all tokens went into hidden thoughts.
            text = (message.get("content") or "") if isinstance(message, dict) else None
        if not isinstance(text, str):
            raise ServerError(f"{self.client.url}{self.path} answered with a choice that has no text: {sorted(choice)}")
        return text
