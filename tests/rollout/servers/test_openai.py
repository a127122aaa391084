"""A real server on this machine that answers from the in-process sampler, and one that misbehaves as told."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rla_lightning.models.language_model import LoadedModel
from rla_lightning.rollout.servers import client
from rla_lightning.rollout.servers.client import Client
from rla_lightning.rollout.servers.openai import OpenAIServer
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import ConfigError, SamplingParams, ServerError

KEY = "sk-secret-of-this-test"
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=5)
Answer = tuple[int, dict[str, str], bytes]  # status, headers, content


@dataclass
class Server:
    url: str = ""
    script: list[Callable[[BaseHTTPRequestHandler], Answer | None]] = field(default_factory=list)  # used up first
    answer: Callable[[str, dict], dict] = lambda path, body: said("fine")
    received: list[tuple[str, dict, dict]] = field(default_factory=list)  # path, headers, body
    times: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: int = 0
    most_running: int = 0

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        with self.lock:
            body = json.loads(content)
            self.received.append((request.path, dict(request.headers), body))
            self.times.append(time.monotonic())
            step = self.script.pop(0) if self.script else None
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        answer = step(request) if step else (200, {}, json.dumps(self.answer(request.path, body)).encode())
        with self.lock:
            self.running -= 1
        if answer is None:  # the connection is closed without a word
            return
        status, headers, content = answer
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)


def said(text: str, finish_reason: str = "stop") -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def status(number: int, content: str = "", **headers: str) -> Callable[[BaseHTTPRequestHandler], Answer]:
    return lambda _: (number, {name.replace("_", "-"): value for name, value in headers.items()}, content.encode())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(client, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(client, "POLL_S", 0.05)
    monkeypatch.setenv("KEY_OF_THIS_TEST", KEY)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.handle(self)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        state.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        with ThreadPoolExecutor(1) as pool:
            pool.submit(http.serve_forever, 0.02)
            yield state
            http.shutdown()


def in_process(model, tokenizer) -> Callable[[str, dict], dict]:
    """Answers as a server of the model would; its seeds are the requests' own."""
    sampler, lock = TransformersSampler(model, tokenizer), threading.Lock()

    def answer(path: str, body: dict) -> dict:
        assert path == "/v1/completions"
        text = body["prompt"]
        ids = tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else text
        params = SamplingParams(body["temperature"], body["top_p"], body.get("top_k", 0), body["max_tokens"])
        with lock:
            ((completion,),) = sampler.sample([ids], 1, params, [str(body["seed"])])
        return said(completion.text, "stop" if completion.stop_reason == "EOS" else "length")

    return answer


@pytest.mark.parametrize("token_ids", [False, True])
def test_completions_of_a_real_model(server, model, tokenizer, token_ids):
    server.answer = in_process(model, tokenizer)
    sampler = OpenAIServer(server.url, "tiny", token_ids=token_ids).sampler(tokenizer)
    prompts = [(3, 6, 7, 8), (9, 10), (6, 1, 7)]  # <act> #look #good #bad; +1 -1; #look </s> #good
    drawn = sampler.sample(prompts, 4, PARAMS, ["a", "b", "c"])
    again = sampler.sample(prompts[::-1], 4, PARAMS, ["c", "b", "a"])[::-1]
    assert drawn == again
    assert len({completion.token_ids for row in drawn for completion in row}) > 5
    for completion in (c for row in drawn for c in row):
        assert completion.logprobs == ()
        assert (completion.stop_reason == "EOS") == (completion.token_ids[-1:] == (1,))
        assert tokenizer.decode(completion.token_ids, skip_special_tokens=True) == completion.text
    assert {completion.stop_reason for row in drawn for completion in row} == {"EOS", "TRUNCATED"}
    sent = {json.dumps(body["prompt"]) for _, _, body in server.received}
    words = {'"<act> #look #good #bad"', '"+1 -1"', '"#look </s> #good"'}  # special tokens stay
    assert sent == ({"[3, 6, 7, 8]", "[9, 10]", "[6, 1, 7]"} if token_ids else words)
    assert len({body["seed"] for _, _, body in server.received}) == 12


def test_a_session_hands_over_each_answer_when_it_is_there(server, tokenizer):
    released = threading.Event()

    def answer(path: str, body: dict) -> dict:
        if body["prompt"] == "go":
            assert released.wait(5)
        return said(body["prompt"])

    server.answer = answer
    with OpenAIServer(server.url, "tiny").sampler(tokenizer).session(PARAMS) as session:
        assert session.completed() == []
        session.submit(7, (11,), "slow")  # go
        session.submit(3, (15,), "quick")  # left
        ((ticket, completion),) = session.completed()
        assert (ticket, completion.text) == (3, "left")
        session.submit(3, (16,), "quick again")  # a ticket is free once its answer came
        ((ticket, completion),) = session.completed()
        assert (ticket, completion.text, completion.token_ids, completion.stop_reason) == (3, "right", (16, 1), "EOS")
        with pytest.raises(ValueError, match="ticket 7 is still open"):
            session.submit(7, (15,), "x")
        released.set()
        assert [ticket for ticket, _ in session.completed()] == [7]
        assert session.completed() == []


def test_a_key_and_a_session_have_the_same_seed(server, tokenizer):
    sampler = OpenAIServer(server.url, "tiny").sampler(tokenizer)
    sampler.sample([(11,)], 1, PARAMS, ["key"])
    with sampler.session(PARAMS) as session:
        session.submit(0, (11,), "key")
        session.completed()
    assert server.received[0][2] == server.received[1][2]


def test_what_is_sent(server, tokenizer):
    OpenAIServer(server.url + "/", "tiny", "KEY_OF_THIS_TEST", extra={"seed": None, "user": "me"}).build(
        LoadedModel(None, tokenizer, 256), "judge"
    ).sample([(11, 3)], 1, SamplingParams(0.5, 0.8, 4, 9), ["a"])
    ((path, headers, body),) = server.received
    assert path == "/v1/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert body == {
        **{"model": "tiny", "prompt": "go <act>", "max_tokens": 9, "temperature": 0.5, "top_p": 0.8, "top_k": 4},
        "user": "me",
    }


def test_chat_is_one_user_message_without_special_tokens(server, tokenizer):
    contents = iter(["left right", None])
    server.answer = lambda path, body: {"choices": [{"message": {"content": next(contents)}, "finish_reason": "length"}]}
    sampler = OpenAIServer(server.url, "tiny", endpoint="chat").sampler(tokenizer)
    ((completion,),) = sampler.sample([(3, 11, 15)], 1, PARAMS, ["a"])
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("left right", (15, 16), "TRUNCATED")
    path, _, body = server.received[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "go left"}]
    assert sampler.sample([(3,)], 1, PARAMS, ["a"])[0][0].text == ""  # all tokens were hidden thoughts


def test_what_passes_is_tried_again(server, tokenizer):
    server.script = [
        status(500, "one"),
        status(429, Retry_After="0.4"),
        lambda request: None,  # closed
        lambda request: time.sleep(1.5),  # silent for longer than the client waits
        status(503),
    ]
    sampler = OpenAIServer(server.url, "tiny", retries=5, timeout_s=0.8).sampler(tokenizer)
    ((completion,),) = sampler.sample([(11,)], 1, PARAMS, ["a"])
    assert completion.text == "fine"
    assert len(server.received) == 6
    waits = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    assert waits[1] >= 0.4  # as asked
    assert waits[0] < 0.3
    assert 0.8 <= waits[3] < 1.5


@pytest.mark.parametrize(
    ("step", "tries", "message"),
    [
        (status(500, "out of\nmemory"), 3, r"/v1/completions: status 500: out of memory \(tries: 3\)"),
        (status(429, Retry_After="3600"), 1, r"status 429: .*\(tries: 1, it asks to wait 3600 s\)"),
        (
            status(400, f"no model 'tiny', key {KEY}" + "x" * 5000),
            1,
            r"status 400: no model 'tiny', key \*\*\*x{400,480} \.\.\. \(tr",
        ),
        (status(401, "wrong key"), 1, r"status 401: wrong key \(tries: 1\)"),
        (status(307, Location="http://127.0.0.1:9/"), 1, r"status 307:"),
        (lambda request: None, 3, r"RemoteDisconnected.*\(tries: 3\)"),
        (status(200, "<html>"), 1, r"not JSON: '<html>'"),
        (status(200, "[]"), 1, r"one choice, got \[\]"),
        (status(200, '{"choices": []}'), 1, r"one choice, got 0 choices"),
        (status(200, '{"choices": [{}, {}]}'), 1, r"one choice, got 2 choices"),
        (status(200, '{"choices": [{"index": 0}]}'), 1, r"no text: \['index'\]"),
        (status(200, '{"error": "busy"}'), 1, r'one choice, got \{"error": "busy"\}'),
    ],
)
def test_one_clear_error(server, tokenizer, step, tries, message):
    server.script = [step] * 10
    sampler = OpenAIServer(server.url, "tiny", "KEY_OF_THIS_TEST", retries=2, timeout_s=5).sampler(tokenizer)
    with pytest.raises(ServerError, match=message) as caught:
        sampler.sample([(11,)], 1, PARAMS, ["a"])
    assert len(server.received) == tries
    assert KEY not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_a_silent_server_and_none_at_all(server, tokenizer):
    server.script = [lambda request: time.sleep(1)]
    with pytest.raises(ServerError, match=r"TimeoutError.*tries: 1"):
        OpenAIServer(server.url, "tiny", retries=0, timeout_s=0.2).sampler(tokenizer).sample([(11,)], 1, PARAMS, ["a"])
    with pytest.raises(ServerError, match=r"refused.*tries: 2"):
        OpenAIServer("http://127.0.0.1:9", "tiny", retries=1).sampler(tokenizer).sample([(11,)], 1, PARAMS, ["a"])


def test_no_more_requests_than_allowed_at_a_time(server, tokenizer):
    def slow(path: str, body: dict) -> dict:
        time.sleep(0.05)
        return said("fine")

    server.answer = slow
    OpenAIServer(server.url, "tiny", concurrency=3).sampler(tokenizer).sample([(11,)], 12, PARAMS, ["a"])
    assert server.most_running == 3


def test_an_error_ends_the_session_although_others_are_waiting(server, tokenizer):
    server.script = [status(500)] * 100
    began = time.monotonic()
    with pytest.raises(ServerError):
        OpenAIServer(server.url, "tiny", concurrency=2, retries=0).sampler(tokenizer).sample([(11,)], 50, PARAMS, ["a"])
    assert time.monotonic() - began < 2
    time.sleep(0.2)
    assert len(server.received) < 50  # nobody asks on


def test_a_frozen_model_refuses_weights(server, model, tokenizer):
    with pytest.raises(ConfigError, match=r"'tiny' at http.* is frozen"):
        OpenAIServer(server.url, "tiny").sampler(tokenizer).update_weights(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url must be of the form .* got 'localhost:8000'"),
        ({"base_url": "http://host/v1?x=1"}, "base_url must be of the form"),
        ({"base_url": "http://me:pw@host/v1"}, "^base_url holds a password: "),
        ({"model": ""}, "model must be the name"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "'NOT_SET_ANYWHERE', which is not set"),
        ({"endpoint": "embeddings"}, "got 'embeddings'"),
        ({"endpoint": "chat", "token_ids": True}, "token_ids needs the endpoint 'completions'"),
        ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
        ({"retries": -1}, "retries must not be negative, got -1"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        OpenAIServer(**{"base_url": "http://localhost:8000/v1", "model": "tiny", **settings})
    assert "pw" not in str(caught.value)


def test_the_key_is_not_shown(monkeypatch):
    assert KEY not in repr(Client("http://localhost", 1.0, key=KEY))
    monkeypatch.setenv("KEY_OF_THIS_TEST", KEY)
    assert KEY not in str(vars(OpenAIServer("http://localhost", "tiny", "KEY_OF_THIS_TEST")))


def test_bad_requests_are_named(server, tokenizer):
    sampler = OpenAIServer(server.url, "tiny").sampler(tokenizer)
    assert sampler.sample([], 1, PARAMS, []) == []
    with pytest.raises(ConfigError, match="is empty"):
        sampler.sample([()], 1, PARAMS, ["a"])
    with pytest.raises(ConfigError, match="is empty"), sampler.session(PARAMS) as session:
        session.submit(0, (), "a")
    assert not server.received
