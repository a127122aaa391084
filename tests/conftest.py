"""Small real runs of the command line, in this process and in others, on the environment of environments/README.md."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rla_lightning.cli import main
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


def code_block(language: str) -> str:
    """The only code block in that language of the guide to environments."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    return block


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


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

    def run(*args: object, cwd: Path, timeout: float = 120) -> Outcome:
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
