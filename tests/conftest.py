"""Small real runs of the command line, in this process and in others, on the environment of environments/README.md."""

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning  # noqa: F401 (its log handler keeps the stderr that it finds: not that of a single test)
import pytest

from rla_lightning.sandbox import Sandbox, SandboxSettings
from rla_lightning.types import ConfigError

ROOT = Path(__file__).parent.parent
README = ROOT / "rla_lightning" / "environments" / "README.md"
TINY = "{tiny: {width: 16, layers: 1, heads: 2, mlp_width: 32}}"
CALLBACKS = """
import os
import signal

import lightning as L
from lightning.pytorch.callbacks import Checkpoint


def die(trainer, epoch):
    if trainer.current_epoch == epoch:
        os.kill(os.getpid(), signal.SIGKILL)


class KillAfterBatch(L.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, trainer, *_):
        die(trainer, self.epoch)


class KillAtEpochEnd(L.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, *_):
        die(trainer, self.epoch)


class KillAfterCheckpoint(Checkpoint):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, *_):
        die(trainer, self.epoch)
"""
CONFIG = f"""
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  check_val_every_n_epoch: 2
  callbacks:
    - class_path: callbacks.WarmStart
      init_args: {{episodes: 20, policy_updates: 60, judge_updates: 20, batch_size: 16, cache: null}}
    - class_path: callbacks.RunSummary
    - class_path: callbacks.TrajectoryLog
      init_args: {{every_n_epochs: 1}}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{filename: "{{epoch}}", save_last: true, save_top_k: 1}}
model:
  policy: {TINY}
  reward_model: {TINY}
  critic: {TINY}
  policy_optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 3.0e-3}}}}
  policy_scheduler: {{class_path: torch.optim.lr_scheduler.LinearLR, init_args: {{total_iters: 4}}}}
  rollout: {{group_size: 4, num_judgments: 2, max_new_tokens: 1, max_judge_tokens: 1}}
  acceptance: {{rule: threshold}}
  policy_update: {{minibatches: 2}}
  reward_model_update: {{minibatches: 2, success_low: 0.0, success_high: 1.0}}
  critic_update: {{minibatches: 2}}
data:
  environment: {{class_path: corridor.CorridorEnvironment, init_args: {{rooms: 8, slack: 6}}}}
  adapter: {{class_path: rla_lightning.curriculum.adapters.ParametricAdapter}}
  tasks_per_iteration: 4
  pool_size: 8
  validation_tasks: 2
  test_tasks: 2
"""


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# `make test` runs files side by side in several processes. These are never beside each other: they give programs little time
# and count processes, or start some that are busy at the same time.
CROWDED = (
    *("tests/sandbox/", "tests/environments/test_alfworld_engine.py", "tests/models/test_sharding.py", "tests/test_fsdp2.py"),
    *("tests/rollout/servers/", "tests/test_vllm_run.py"),
)
# They come first, then what takes longest besides, so that every process has work until the end.
LONG = (
    *("tests/test_scale.py", "tests/test_cli.py", "tests/test_configs.py", "tests/test_resume.py", "tests/test_coding_loop.py"),
    *("tests/environments/test_alfworld_hash_seed.py", "tests/environments/test_coding_pipelines.py"),
    *("tests/environments/test_alfworld_rewriting.py", "tests/test_user_code.py", "tests/test_scale_coding.py"),
    *("tests/environments/test_household_episode.py", "tests/rollout/test_formats_code.py"),
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one process, in their order, for they share fixtures."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "crowded" if nodeid.startswith(CROWDED) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the order in which the scheduler hands them out; without several processes it stays that of their names."""
    if hasattr(config, "workerinput"):
        places = {file: place for place, file in enumerate(LONG)}
        items.sort(key=lambda item: -1 if item.nodeid.startswith(CROWDED) else places.get(item.nodeid.split("::")[0], len(LONG)))


def code_block(language: str) -> str:
    """The only code block in that language of the guide to environments."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    return block


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _same_draws() -> None:
    """In every file, whichever ran before it in this process."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def needs_isolation() -> None:
    """Or no program is run; continuous integration has to be able to."""
    sandbox = Sandbox(SandboxSettings(workers=1))
    try:
        sandbox.start()
    except ConfigError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    sandbox.close()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder: corridor.py of the guide, test_callbacks.py and run.yaml."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "corridor.py").write_text(code_block("python"))
    (folder / "callbacks_of_tests.py").write_text(CALLBACKS)
    (folder / "run.yaml").write_text(CONFIG)
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Its one error message."""
        assert self.code == 2, self
        assert "Traceback" not in self.err, self
        assert "usage:" not in self.err, self
        (line,) = [line for line in self.err.splitlines() if "error" in line.lower()]
        assert line.startswith("rla: error: "), line
        return line.removeprefix("rla: error: ")


@pytest.fixture
def rla(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs the command line in this process."""
    from rla_lightning.cli import main

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rla"])
        code = 0
        try:
            main([str(arg) for arg in args])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def random_qwen() -> Callable[[Path, Sequence[str], Sequence[str]], Path]:
    """Makes tiny random Qwen2.5 models as `save_pretrained` leaves them."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    def make(place: Path, corpus: Sequence[str], answers: Sequence[str]) -> Path:
        """Of a tokenizer trained on the corpus, in which each answer is one token that the model prefers to most others."""
        alphabet = sorted(ByteLevel.alphabet())
        raw = Tokenizer(BPE())
        raw.pre_tokenizer, raw.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
        raw.train_from_iterator(
            corpus, BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL[1:2]
        )
        tokenizer.add_tokens(list(answers))
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(place)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16384, bos_token_id=None, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        weights = Qwen2ForCausalLM(config)
        weights.model.embed_tokens.weight.data += 0.1  # all hidden states are about (1, ..., 1)
        weights.lm_head.weight.data.zero_()
        likely = tokenizer.convert_tokens_to_ids([*answers, "<|im_end|>"])
        weights.lm_head.weight.data[likely] = 0.7 + 0.1 * torch.randn(len(likely), 16)  # logits of about 11, the others' are 0
        weights.save_pretrained(place)
        return place

    return make


@pytest.fixture(scope="session")
def rla_process() -> Callable[..., Outcome]:
    """Runs the console script in a new process, as users do."""

    def run(*args: object, cwd: Path, timeout: float = 240) -> Outcome:
        script = Path(sys.executable).with_name("rla")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [str(script), *map(str, args)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Outcome(ended.returncode, ended.stdout, ended.stderr)

    return run


@pytest.fixture
def completions_server() -> Iterator[Callable[[Callable[[dict], str]], tuple[str, list[dict]]]]:
    """Starts a server of OpenAI's interface on this machine: its address and what it was asked, for a function that answers."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[dict], str]) -> tuple[str, list[dict]]:
        asked: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append(body)
                content = json.dumps({"choices": [{"index": 0, "text": answer(body), "finish_reason": "stop"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
