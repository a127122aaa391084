"""A real vLLM server, started once: `make vllm` first. It serves what the tests give it, one after the other."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from rla_lightning.models.language_model import LoadedModel
from rla_lightning.rollout.drawing import filter_logits
from rla_lightning.rollout.servers import vllm
from rla_lightning.rollout.servers.client import Client
from rla_lightning.rollout.servers.vllm import VllmSampler, VllmServer
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import Completion, ConfigError, SamplingParams, ServerError

PYTHON = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
ON_CPU = ["--enforce-eager", "--kv-cache-memory-bytes", "67108864", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
WITH_LORA = ["--enable-lora", "--max-lora-rank", "8"]
CONTEXT = 256
ENDS = (1, 12)
GAP = 1e-3  # of log-probs, float32 on both sides
PROMPTS = [(6, 7, 8), (9, 10, 11, 13), (14,), tuple(range(3, 27)) * 7]  # the last one fills a block of the prefix cache
KEYS = ["a", "b", "c", "d"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # a first start compiles bytecode, 60 to 180 s


def changed(model: nn.Module, seed: int) -> nn.Module:
    """Noise on every weight, or on those of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not isinstance(model, PeftModel) or "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
    return model


def gap(model: nn.Module, prompts: Sequence[Sequence[int]], drawn: list[list[Completion]], params: SamplingParams) -> float:
    """Largest difference between the server's log-probs and those of one forward per completion."""
    largest = 0.0
    for prompt, completions in zip(prompts, drawn, strict=True):
        for completion in completions:
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logits = model.eval()(input_ids=ids).logits[0, len(prompt) - 1 : -1] / params.temperature
            ours = filter_logits(logits, params.top_k, params.top_p).log_softmax(-1)
            ours = ours.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            largest = max(largest, float((ours - torch.tensor(completion.logprobs)).abs().max()))
    return largest


@pytest.fixture(scope="module")
def loaded(make_model, make_tokenizer) -> LoadedModel:
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), width=128, scale=0.1)  # heads of 32: vLLM's smallest on a CPU
    model.generation_config.eos_token_id = list(ENDS)
    return LoadedModel(model, tokenizer, CONTEXT)


@pytest.fixture(scope="module")
def sampler(loaded: LoadedModel) -> Iterator[VllmSampler]:
    if not PYTHON.exists():
        assert os.environ.get("CI") != "true", "no .venv-vllm: run `make vllm`"
        pytest.skip("no .venv-vllm: `make vllm` makes it")
    built = VllmServer(str(PYTHON), arguments=ON_CPU + WITH_LORA).build(loaded, "policy")
    yield built
    built.close()


@pytest.fixture
def fresh(sampler: VllmSampler, loaded: LoadedModel) -> VllmSampler:
    sampler.update_weights(loaded.model)
    return sampler


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=8),
        SamplingParams(temperature=0.7, max_new_tokens=8),
        SamplingParams(temperature=1.4, top_k=5, max_new_tokens=8),
        SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=8),
        SamplingParams(temperature=1.2, top_p=0.7, top_k=12, max_new_tokens=8),
    ],
)
def test_log_probs_are_those_of_the_sampling_distribution(fresh, loaded, params):
    drawn = fresh.sample(PROMPTS, 6, params, KEYS)
    assert gap(loaded.model, PROMPTS, drawn, params) < GAP
    assert min(min(c.logprobs) for row in drawn for c in row) < -1  # not always the likeliest token
    for completion in (c for row in drawn for c in row):
        assert len(completion.logprobs) == len(completion.token_ids) <= 8
        assert (completion.stop_reason == "EOS") == (completion.token_ids[-1] in ENDS)
        assert not set(completion.token_ids[:-1]) & set(ENDS)
        assert completion.stop_reason == "EOS" or len(completion.token_ids) == 8
        assert completion.text == loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert {c.stop_reason for row in drawn for c in row} == {"EOS", "TRUNCATED"}


def test_greedy_is_the_in_process_sampler(fresh, loaded):
    params = SamplingParams(temperature=0.0, max_new_tokens=8)
    expected = TransformersSampler(loaded.model, loaded.tokenizer).sample(PROMPTS, 1, params, KEYS)
    assert fresh.sample(PROMPTS, 1, params, KEYS) == expected  # log-probs 0, texts and ends, too


def test_a_sample_is_a_function_of_key_and_number(fresh):
    params = SamplingParams(max_new_tokens=6)
    together = [[c.token_ids for c in row] for row in fresh.sample(PROMPTS, 5, params, KEYS)]
    backwards = [[c.token_ids for c in row] for row in fresh.sample(PROMPTS[::-1], 5, params, KEYS[::-1])][::-1]
    fewer = [[c.token_ids for c in row] for row in fresh.sample(PROMPTS[1:3], 2, params, KEYS[1:3])]
    assert together == backwards
    assert fewer == [row[:2] for row in together[1:3]]
    assert len({ids for row in together for ids in row}) > 12
    other = [[c.token_ids for c in row] for row in fresh.sample(PROMPTS, 5, params, ["e", "f", "g", "h"])]
    assert other != together


def test_a_session_answers_every_ticket_as_long_as_it_is_asked(fresh, loaded):
    params = SamplingParams(max_new_tokens=4)
    turns, answered = dict.fromkeys(range(20), 0), []
    with fresh.session(params) as session:
        prompts = {ticket: (3, 6 + ticket % 5) for ticket in turns}
        for ticket, prompt in prompts.items():
            session.submit(ticket, prompt, f"{ticket}/0")
        while answers := session.completed():
            for ticket, completion in answers:
                answered.append((prompts[ticket], [completion]))
                turns[ticket] += 1
                if turns[ticket] < 1 + ticket % 4:  # some conversations are longer than others
                    prompts[ticket] = (*prompts[ticket], *completion.token_ids, 7)
                    session.submit(ticket, prompts[ticket], f"{ticket}/{turns[ticket]}")
    assert turns == {ticket: 1 + ticket % 4 for ticket in range(20)}
    assert gap(loaded.model, [prompt for prompt, _ in answered], [drawn for _, drawn in answered], params) < GAP


def test_prompts_at_the_limit_of_the_context(fresh, loaded):
    params = SamplingParams(temperature=0.9, max_new_tokens=6)
    longest = (tuple(range(3, 27)) * 20)[: CONTEXT - 6]
    drawn = fresh.sample([longest], 8, params, ["x"])
    assert gap(loaded.model, [longest], drawn, params) < GAP
    assert max(len(c.token_ids) for c in drawn[0]) == 6
    with pytest.raises(ConfigError, match="251 tokens and max_new_tokens 6 do not fit in the context of 256"):
        fresh.sample([(3, *longest)], 1, params, ["x"])


def test_all_weights_are_updated_and_cached_prefixes_forgotten(fresh, loaded, make_model):
    params = SamplingParams(max_new_tokens=6)
    before = fresh.sample(PROMPTS, 4, params, KEYS)
    trained = make_model(len(loaded.tokenizer), width=128, scale=0.1)
    for seed in range(3):
        fresh.update_weights(changed(trained, seed))
        after = fresh.sample(PROMPTS, 4, params, KEYS)
        assert gap(trained, PROMPTS, after, params) < GAP
        assert gap(loaded.model, PROMPTS, after, params) > 0.1
        assert after != before
    assert len(list(fresh.folder.glob("weights-*"))) == 1  # earlier files are removed
    fresh.update_weights(loaded.model)
    assert fresh.sample(PROMPTS, 4, params, KEYS) == before


def test_an_adapter_is_updated_on_a_server_that_runs_already(sampler, loaded, make_model):
    base = changed(make_model(len(loaded.tokenizer), width=128, scale=0.1), seed=7)  # not what is served now
    target = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=target, task_type="CAUSAL_LM"))
    connected = VllmServer(url=sampler.client.url).build(LoadedModel(model, loaded.tokenizer, CONTEXT), "reward_model")
    params = SamplingParams(temperature=0.9, max_new_tokens=6)
    drawn = [connected.sample(PROMPTS, 4, params, KEYS)]
    assert gap(model, PROMPTS, drawn[0], params) < GAP
    for seed in range(3):
        connected.update_weights(changed(model, seed))
        drawn.append(connected.sample(PROMPTS, 4, params, KEYS))
        assert gap(model, PROMPTS, drawn[-1], params) < GAP
        with model.disable_adapter():
            assert gap(model, PROMPTS, drawn[-1], params) > 0.05
    assert all(drawn[i] != drawn[i + 1] for i in range(3))
    served = [card["id"] for card in connected.client.ask("/v1/models")["data"]]
    assert served == ["policy", connected.served]  # earlier adapters are unloaded


def test_two_processes_with_a_sharded_model(sampler, tmp_path):
    script = str(Path(__file__).with_name("two_processes.py"))
    command = [sys.executable, "-W", "ignore", script, sampler.client.url, str(tmp_path / "store")]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all("all equal" in output for output in outputs), "\n".join(outputs)


def test_a_server_that_does_not_fit_is_refused(sampler, loaded):
    with pytest.raises(ConfigError, match="context of 256 tokens is shorter than the model's 1000"):
        VllmServer(url=sampler.client.url).build(LoadedModel(loaded.model, loaded.tokenizer, 1000), "policy")
    with pytest.raises(ConfigError, match=r"no vLLM server with VLLM_SERVER_DEV_MODE=1: .*refused"):
        VllmServer(url="http://127.0.0.1:9").build(loaded, "policy")


def test_bad_requests_do_not_reach_the_server(fresh):
    for prompt, params, message in (
        ((3, 27), SamplingParams(), "outside the vocabulary of 27: 3 to 27"),
        ((3, -1), SamplingParams(), "outside the vocabulary of 27: -1 to 3"),
        ((), SamplingParams(), "is empty"),
        ((3,), SamplingParams(temperature=0.001), r"at least 0\.01, got 0\.001"),
        ((3,), SamplingParams(top_p=0.0), r"top_p=0\.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            fresh.sample([prompt], 1, params, ["x"])


def test_what_the_server_refuses_is_shown(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "served", "another name")
    with pytest.raises(ServerError, match=r"/v1/completions: status 404: .*`another name` does not exist.*\(tries: 1\)"):
        fresh.sample([(6,)], 1, SamplingParams(), ["x"])


def in_flight(sampler: VllmSampler) -> tuple[threading.Thread, list[BaseException]]:
    """Sampling in another thread, until it fails."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                sampler.sample(PROMPTS, 16, SamplingParams(max_new_tokens=60), KEYS)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert not raised
    return thread, raised


def test_a_silent_server_is_noticed(fresh, monkeypatch):
    monkeypatch.setattr(vllm, "HEALTH_S", 0.5)
    monkeypatch.setattr(fresh, "health", Client(fresh.client.url, 1.0, proxied=False))
    thread, raised = in_flight(fresh)
    os.killpg(fresh.process.group, signal.SIGSTOP)
    try:
        thread.join(10)
    finally:
        os.killpg(fresh.process.group, signal.SIGCONT)
    assert not thread.is_alive()
    assert isinstance(raised[0], ServerError)
    assert "silent" in str(raised[0])


def test_a_killed_server_is_an_error_with_its_log(fresh, loaded):  # the last test: nothing is served any more
    thread, raised = in_flight(fresh)
    began = time.monotonic()
    group = fresh.process.group  # its first process only watches over the server
    os.kill(int(Path(f"/proc/{group}/task/{group}/children").read_text().split()[0]), signal.SIGKILL)
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(raised[0], ServerError)
    assert "vLLM server of the policy ended with exit code 137; its log:\n" in str(raised[0])
    assert "INFO" in str(raised[0])  # the server's own lines
    with pytest.raises(ServerError, match="ended with exit code 137"):
        fresh.update_weights(loaded.model)
    assert time.monotonic() - began < 10
    fresh.close()
    with pytest.raises(ProcessLookupError):  # the engine does not outlive its server
        os.killpg(fresh.process.group, 0)
    assert not fresh.folder.exists()


STAND_IN = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
arguments = sys.argv[1:]
print("received", json.dumps(["started", arguments]), flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        model = {{"logprobs_mode": "processed_logprobs", "max_model_len": 256}}
        self.answer({{"vllm_config": {{"model_config": model, "lora_config": {{"r": 16}}}}, "data": [{{"id": "policy"}}]}})
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print("received", json.dumps([self.path, json.loads(body)]), flush=True)
        self.answer({{}})
    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_for_an_adapter_is_started_with_its_base(loaded, make_model, tmp_path):
    """A stand-in for vLLM writes down what it is given."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    base = make_model(len(loaded.tokenizer), width=128, scale=0.1)
    plain = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=9, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    server = VllmServer(str(python), arguments=["--dtype", "bfloat16"], directory=str(tmp_path))
    sampler = server.build(LoadedModel(model, loaded.tokenizer, CONTEXT), "policy")
    sampler.update_weights(changed(model, seed=1))
    received = [json.loads(line.split(" ", 1)[1]) for line in sampler.process.log.read_text().splitlines() if "received" in line]
    (_, arguments), (load, first), (again, second), (unload, former) = received
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    settings = dict(pairwise(arguments))
    assert settings["--max-lora-rank"] == "16"
    assert settings["--max-model-len"] == "256"
    assert settings["--host"] == "127.0.0.1"
    assert [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--dtype"] == ["float32", "bfloat16"]
    written = load_file(Path(settings["--model"]) / "model.safetensors")
    assert written.keys() == plain.keys()  # no adapter, and the output layer although it is tied
    assert all(torch.equal(written[name], tensor) for name, tensor in plain.items())
    assert (load, again, unload) == ("/v1/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    assert first["lora_name"] == former["lora_name"] != second["lora_name"] == sampler.served
    adapter = load_file(Path(second["lora_path"]) / "adapter_model.safetensors")
    weight = model.get_parameter("base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight")
    assert torch.equal(adapter["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"], weight)
    assert not Path(first["lora_path"]).exists()
    sampler.close()
    assert list(tmp_path.iterdir()) == [python]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"python": None}, "give either python or url, got python=None and url=None"),
        ({"url": "http://localhost:8000"}, "give either python or url"),
        ({"python": "/nowhere/python"}, "'/nowhere/python' does not exist: `make vllm`"),
        ({"python": None, "url": "localhost"}, "url must be of the form"),
        ({"python": None, "url": "http://localhost:1", "arguments": ["--x"]}, "arguments and environment are for a server that"),
        ({"directory": "/nowhere"}, "directory '/nowhere' does not exist"),
        ({"concurrency": 0}, "concurrency must be positive, got 0"),
        ({"timeout_s": -1}, "timeout_s must be positive, got -1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        VllmServer(**{"python": sys.executable, **settings})


def test_a_server_that_cannot_start_shows_why(loaded):
    with pytest.raises(
        ServerError, match=r"policy ended with exit code 1; its log:\n.*No module named 'vllm'|No module named vllm"
    ):
        VllmServer(sys.executable).build(loaded, "policy")
