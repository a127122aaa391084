"""Completions over HTTP: one request per sample, many at a time; what the samplers of both kinds of server share."""

from __future__ import annotations

import json
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from queue import Empty, SimpleQueue
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from rla_lightning.rollout.randomness import sample_seeds
from rla_lightning.rollout.sampler import Sampler, Session, check_request
from rla_lightning.types import Completion, ConfigError, SamplingParams, ServerError

SHOWN = 500  # characters of a server's answer in an error
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0  # between tries, doubled each time
_JITTER = random.Random()  # of delays only, results do not depend on it
POLL_S = 1.0  # how often the server is looked at while answers are awaited


class _Refused(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Never follow: the key would go to another host."""


@dataclass(frozen=True)
class Client:
    """Sends JSON to a server, again if that can help."""

    url: str  # of the server, without a slash at the end
    timeout_s: float
    retries: int = 0
    key: str | None = field(default=None, repr=False)
    proxied: bool = True  # whether the environment's proxies are used

    def ask(self, path: str, body: Any = None, given_up: threading.Event | None = None) -> Any:
        """The JSON that the server answers."""
        content = self.send(path, body, given_up)
        try:
            return json.loads(content)
        except ValueError as error:
            raise ServerError(f"{self.url}{path} answered something that is not JSON: {self._shown(content)!r}") from error

    def send(self, path: str, body: Any = None, given_up: threading.Event | None = None) -> bytes:
        """What the server answers; GET without a body.

        Connection errors, timeouts and the statuses 429 and 5xx are tried again, with delays that double or are as long
        as the server asks for.

        Args:
            given_up: once it is set there are no further tries.
        """
        wait_for = (given_up or threading.Event()).wait
        for attempt in range(1, self.retries + 2):
            asked = 0.0
            try:
                status, headers, content = self._exchange(path, body)
            except (OSError, HTTPException) as error:
                problem = self._shown(f"{type(error).__name__}: {error}".encode())
            else:
                if status < 300:
                    return content
                problem = f"status {status}: {self._shown(content)}"
                asked = _asked_delay(headers)
                if (status != 429 and status < 500) or asked > self.timeout_s:
                    break
            delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1)) * _JITTER.uniform(0.5, 1)
            if attempt > self.retries or wait_for(max(delay, asked)):
                break
        waiting = f", it asks to wait {asked:g} s" if asked > self.timeout_s else ""
        raise ServerError(f"{self.url}{path}: {problem} (tries: {attempt}{waiting})")

    def is_answering(self, path: str) -> bool:
        """Whether a GET succeeds now."""
        try:
            return self._exchange(path, None)[0] < 300
        except (OSError, HTTPException):
            return False

    def _exchange(self, path: str, body: Any) -> tuple[int, Message, bytes]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        opener = build_opener(_Refused, *(() if self.proxied else (ProxyHandler({}),)))
        try:
            response = opener.open(Request(self.url + path, data, headers), timeout=self.timeout_s)
        except HTTPError as error:  # an answer, too
            response = error
        with response:
            return response.status, response.headers, response.read()

    def _shown(self, content: bytes) -> str:
        text = " ".join(content.decode(errors="replace").split())
        if self.key:
            text = text.replace(self.key, "***")
        return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


def checked_url(url: str, name: str) -> str:
    """An address of the form http(s)://host[:port][/path], without a slash at the end."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{name} must be of the form http(s)://host[:port][/path], got {url!r}")
    if parts.username or parts.password:
        raise ConfigError(f"{name} holds a password: put the key in an environment variable and set api_key_env")
    return url.rstrip("/")


def _asked_delay(headers: Message) -> float:
    """Seconds, from Retry-After: a number or a date; 0 without one."""
    value = headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


class RemoteSession(Session):
    """Threads that ask the server; answers are handed over in the order in which they come."""

    def __init__(self, sampler: RemoteSampler, params: SamplingParams) -> None:
        self._sampler, self._params = sampler, params
        self._open: set[int] = set()
        self._requests: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._given_up = threading.Event()
        self._threads: list[threading.Thread] = []

    def submit(self, ticket: int, prompt: Sequence[int], key: str) -> None:
        check_request([prompt], 1, self._params, [key])
        self.ask(ticket, prompt, int(sample_seeds([key], 1)[0, 0]))

    def ask(self, ticket: int, prompt: Sequence[int], seed: int) -> None:
        """As `submit`, with the 64-bit seed that stands for the key and the sample's number."""
        if ticket in self._open:
            raise ValueError(f"ticket {ticket} is still open")
        body = self._sampler.body(prompt, seed, self._params)  # here, not in a thread: fast tokenizers are not made for several
        self._open.add(ticket)
        self._requests.put((ticket, body))
        if len(self._threads) < min(self._sampler.concurrency, len(self._open)):
            # Daemons: a request that hangs must not keep the process from ending.
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()

    def completed(self) -> list[tuple[int, Completion]]:
        if not self._open:
            return []
        answers = [self._first_answer()]
        while not self._answers.empty():
            answers.append(self._answers.get())
        for ticket, answer in answers:
            if isinstance(answer, Exception):
                self._sampler.watch(True)  # a dead server explains more than a lost connection
                raise answer
            self._open.remove(ticket)
        return [(ticket, self._sampler.read(answer, self._params)) for ticket, answer in answers]

    def close(self) -> None:
        """Let the threads end; what is still open is given up."""
        self._given_up.set()
        for _ in self._threads:
            self._requests.put(None)

    def _first_answer(self) -> tuple[int, Any]:
        while True:
            try:
                return self._answers.get(timeout=POLL_S)
            except Empty:
                self._sampler.watch(False)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None and not self._given_up.is_set():
            ticket, body = request
            try:
                self._answers.put((ticket, self._sampler.client.ask(self._sampler.path, body, self._given_up)))
            except Exception as error:  # raised again where the answers are awaited
                self._answers.put((ticket, error))


class RemoteSampler(Sampler):
    """Samples from a server that answers one request per completion.

    Args:
        path: of the requests, after the client's address.
        concurrency: most requests at a time.
    """

    def __init__(self, client: Client, path: str, concurrency: int) -> None:
        self.client = client
        self.path = path
        self.concurrency = concurrency

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, keys: Sequence[str]
    ) -> list[list[Completion]]:
        check_request(prompts, n, params, keys)
        seeds = sample_seeds(keys, n).reshape(-1).tolist()
        found: dict[int, Completion] = {}
        with self.session(params) as session:
            for ticket, seed in enumerate(seeds):
                session.ask(ticket, prompts[ticket // n], seed)
            while answers := session.completed():
                found.update(answers)
        return [[found[i * n + j] for j in range(n)] for i in range(len(prompts))]

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[RemoteSession]:
        session = RemoteSession(self, params)
        try:
            yield session
        finally:
            session.close()

    @abstractmethod
    def body(self, prompt: Sequence[int], seed: int, params: SamplingParams) -> Any:
        """The request for one completion.

        Args:
            seed: 64 bits, unsigned.
        """

    @abstractmethod
    def read(self, answer: Any, params: SamplingParams) -> Completion:
        """The completion in an answer.

        Raises:
            ServerError: if the answer is not of the form that the server's interface promises.
        """

    def watch(self, has_failed: bool) -> None:
        """Raise what is wrong with the server, if that can be seen from outside.

        Args:
            has_failed: a request has just failed, so that a closer look is worth its time.
        """

    def only_choice(self, answer: Any) -> dict[str, Any]:
        """The one completion in an answer of the OpenAI interface."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            said = f"{len(choices)} choices" if isinstance(choices, list) else json.dumps(answer)[:SHOWN]
            raise ServerError(f"{self.client.url}{self.path} must answer with one choice, got {said}")
        return choices[0]
