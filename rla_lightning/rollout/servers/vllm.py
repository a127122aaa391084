"""Sample a model that is being trained from a vLLM server: token ids in, token ids and their log-probs out.

Weights go to the server as files, which works for any number of processes and devices on both sides: an adapter as a new
version under a new name, all weights by reloading them in place. Checked with vLLM 0.32.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from rla_lightning.distributed import failing_together, from_first, rank
from rla_lightning.models.language_model import LoadedModel
from rla_lightning.rollout.sampler import Sampler, SamplerBackend
from rla_lightning.rollout.servers.client import Client, RemoteSampler, checked_url
from rla_lightning.rollout.servers.process import ServerProcess, free_port
from rla_lightning.rollout.servers.weights import gathered, write_adapter, write_base
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import Completion, ConfigError, SamplingParams, ServerError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's choice for --max-lora-rank
LOWEST_TEMPERATURE = 0.01  # vLLM silently raises lower ones but 0 to it
HEALTH_S, SILENCE_S = 5.0, 20.0  # between looks at the server while answers are awaited; longest silence then
DEATH_S = 3.0  # that a server may take to end after a request has failed
RESET_S = 60.0  # for the caches to be let go of after an update
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that take new weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # all it needs is in the folder
}


class VllmServer(SamplerBackend):
    """vLLM in a process of its own, for the policy and the reward model."""

    def __init__(
        self,
        python: str | None = None,
        url: str | None = None,
        arguments: list[str] | None = None,
        environment: dict[str, str] | None = None,
        directory: str | None = None,
        concurrency: int = 256,
        timeout_s: float = 600.0,
        startup_s: float = 900.0,
    ) -> None:
        """Configure how the server is started or where it is.

        Args:
            python: interpreter of the virtual environment that has vLLM, e.g. .venv-vllm/bin/python (`make vllm`): the first
                process starts a server on this machine. Give either this or url.
            url: address of a server of the same architecture that runs already, e.g. http://localhost:8000, started with
                VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs and --max-model-len, and for LoRA also
                VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora. It gets our weights.
            arguments: further arguments of the server, e.g. [--gpu-memory-utilization, '0.5'] or on a CPU
                [--enforce-eager, --kv-cache-memory-bytes, '1000000000'].
            environment: further variables of the server, e.g. {CUDA_VISIBLE_DEVICES: '1'}.
            directory: where weights are handed over, under the same path on both machines; null: a temporary folder.
            concurrency: most requests at a time, of each process.
            timeout_s: longest time for one answer or for taking new weights.
            startup_s: longest time for the server to start.
        """
        if (python is None) == (url is None):
            raise ConfigError(f"give either python or url, got python={python!r} and url={url!r}")
        if python is not None and not Path(python).expanduser().is_file():
            raise ConfigError(f"python {python!r} does not exist: `make vllm` makes .venv-vllm/bin/python")
        if url is not None and (arguments or environment):
            raise ConfigError("arguments and environment are for a server that is started here: drop them or url")
        if directory is not None and not Path(directory).is_dir():
            raise ConfigError(f"directory {directory!r} does not exist")
        for name, value in (("concurrency", concurrency), ("timeout_s", timeout_s), ("startup_s", startup_s)):
            if value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        # Not resolved: the link's place tells an interpreter which environment is meant.
        self.python = None if python is None else str(Path(python).expanduser().absolute())
        self.url = None if url is None else checked_url(url, "url")
        self.arguments = list(arguments or [])
        self.environment = dict(environment or {})
        self.directory = directory
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.startup_s = startup_s

    def build(self, loaded: LoadedModel, name: str) -> Sampler:
        """Start the server or connect to it, and give it the weights.

        Under several processes all call it, with the model not yet sharded; the first starts the server.
        """
        process, url, folder = None, self.url or "", Path()
        with failing_together():
            if rank() == 0:
                folder = Path(tempfile.mkdtemp(prefix=f"vllm-{name}-", dir=self.directory)).absolute()
                if self.python is not None:
                    url = f"http://127.0.0.1:{free_port()}"
                    process = self._start(loaded, name, url, folder)
        url = from_first(url)
        client = Client(url, self.timeout_s, proxied=self.url is not None)
        sampler = VllmSampler(client, self.concurrency, loaded, name, folder, process)
        with failing_together():
            if rank() == 0:
                sampler.check_settings()
                if process is None:
                    sampler.load_base(loaded.model)
        sampler.served = from_first(sampler.served)
        if isinstance(loaded.model, PeftModel):
            sampler.update_weights(loaded.model)
        return sampler

    def _start(self, loaded: LoadedModel, name: str, url: str, folder: Path) -> ServerProcess:
        model = loaded.model
        write_base(model, gathered(model, adapter=False), folder / "base")
        host, port = url.removeprefix("http://").split(":")
        settings = {
            "model": str(folder / "base"),
            "served-model-name": name,
            "host": host,
            "port": port,
            "max-model-len": str(loaded.context_length),
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",  # not the defaults that come with weights, e.g. a penalty on repetition
        }
        flags = ["--skip-tokenizer-init", "--disable-uvicorn-access-log"]
        if isinstance(model, PeftModel):
            needed = max(vars(config)["r"] for config in model.peft_config.values())
            fitting = next((r for r in RANKS if r >= needed), None)
            if fitting is None:
                raise ConfigError(f"vLLM takes LoRA ranks up to {RANKS[-1]}, got {needed}")
            settings["max-lora-rank"] = str(fitting)
            flags.append("--enable-lora")
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *flags]
        command += [part for key, value in settings.items() for part in (f"--{key}", value)]
        process = ServerProcess(f"vLLM server of the {name}", [*command, *self.arguments], ENVIRONMENT | self.environment, folder)
        health = Client(url, timeout_s=5.0, proxied=False)
        try:
            process.wait_until(lambda: health.is_answering("/health"), self.startup_s)
        except BaseException:  # an interrupt, too: nothing may keep running
            process.stop()
            raise
        return process


class VllmSampler(RemoteSampler):
    """The connection to a server; the first rank also has its process, if that was started here."""

    def __init__(
        self, client: Client, concurrency: int, loaded: LoadedModel, name: str, folder: Path, process: ServerProcess | None
    ) -> None:
        super().__init__(client, "/v1/completions", concurrency)
        self.tokenizer = loaded.tokenizer
        self.context_length = loaded.context_length
        self.vocabulary = loaded.model.config.get_text_config().vocab_size
        self.end_ids = TransformersSampler(loaded.model, loaded.tokenizer).end_ids()
        self.has_adapter = isinstance(loaded.model, PeftModel)
        self.name = name
        self.folder = folder
        self.process = process
        self.served = name  # the name that requests ask for
        self._version = 0
        self._written: Path | None = None
        if process is None and rank() == 0:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.health = Client(client.url, SILENCE_S, proxied=client.proxied)
        self._looked = time.monotonic()

    def check_settings(self) -> None:
        """Refuse a server whose log-probs or context are not what training needs."""
        try:
            config = self.client.ask("/server_info?config_format=json")["vllm_config"]
            model = config["model_config"]
            mode, length, lora = model["logprobs_mode"], model["max_model_len"], config.get("lora_config")
            self.served = self.client.ask("/v1/models")["data"][0]["id"]
        except (ServerError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{self.client.url} is no vLLM server with VLLM_SERVER_DEV_MODE=1: {error}") from error
        if mode != "processed_logprobs":
            raise ConfigError(f"the server at {self.client.url} needs --logprobs-mode processed_logprobs, it has {mode!r}")
        if length < self.context_length:
            raise ConfigError(f"the server's context of {length} tokens is shorter than the model's {self.context_length}")
        if self.has_adapter and not lora:
            raise ConfigError(f"the server at {self.client.url} was started without --enable-lora")

    def update_weights(self, model: nn.Module) -> None:
        """Give the server a model's weights; where they are sharded every process must call this."""
        state = gathered(model, self.has_adapter)
        self._version += 1
        with failing_together():
            if rank() == 0:
                self._load(model, state, self.folder / f"weights-{self._version}")
        self.served = from_first(self.served)

    def load_base(self, model: nn.Module) -> None:
        """Replace the base weights of a server that was started elsewhere; not sharded, first rank only."""
        folder = self.folder / "base"
        self._load_all(model, gathered(model, adapter=False), folder)
        shutil.rmtree(folder)

    def _load(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
        try:
            if self.has_adapter:
                self._load_adapter(model, state, folder)
            else:
                self._load_all(model, state, folder)
        except ServerError:
            self.watch(has_failed=True)
            raise
        if self._written is not None:
            shutil.rmtree(self._written)
        self._written = folder

    def _load_adapter(self, model: Any, state: dict[str, Tensor], folder: Path) -> None:
        write_adapter(model, state, folder)
        # A new name each time: cached prefixes belong to a name, and so do requests that are still running.
        name = f"{self.name}-{self._version}-{folder.parent.name}"
        self.client.send("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if self._written is not None:
            self.client.send("/v1/unload_lora_adapter", {"lora_name": self.served})
        self.served = name

    def _load_all(self, model: Any, state: dict[str, Tensor], folder: Path) -> None:
        write_base(model, state, folder)
        self.client.send("/pause?mode=abort", {})  # what still runs belongs to nobody
        arguments = {"weights_path": str(folder)}
        self.client.ask("/collective_rpc", {"method": "reload_weights", "kwargs": arguments, "timeout": self.client.timeout_s})
        deadline = time.monotonic() + RESET_S
        while not self.client.ask("/reset_prefix_cache", {}).get("success"):
            if time.monotonic() > deadline:
                raise ServerError(f"{self.client.url} did not let go of the prefixes of earlier weights within {RESET_S:g} s")
            time.sleep(0.1)
        self.client.send("/resume", {})

    def body(self, prompt: Sequence[int], seed: int, params: SamplingParams) -> dict[str, Any]:
        if len(prompt) + params.max_new_tokens > self.context_length:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens {params.max_new_tokens} do not fit in the context of "
                f"{self.context_length} tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:  # it would end the server: only its tokenizer checks that
            raise ConfigError(
                f"the prompt has a token outside the vocabulary of {self.vocabulary}: {min(prompt)} to {max(prompt)}"
            )
        if 0 < params.temperature < LOWEST_TEMPERATURE:
            raise ConfigError(f"vLLM needs a temperature of 0 or at least {LOWEST_TEMPERATURE}, got {params.temperature}")
        return {
            "model": self.served,
            "prompt": list(prompt),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed >> 1,  # a signed 64-bit int there
            "stop_token_ids": self.end_ids,
            "ignore_eos": True,  # our end tokens and no others
            "logprobs": 0,  # of the drawn token alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def read(self, answer: Any, params: SamplingParams) -> Completion:
        choice = self.only_choice(answer)
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not logprobs or len(ids) != len(logprobs) or choice.get("finish_reason") not in ("stop", "length"):
            finish = choice.get("finish_reason")
            raise ServerError(
                f"{self.client.url}: {len(ids or ())} tokens with {len(logprobs or ())} log-probs, finish_reason {finish!r}"
            )
        if params.temperature == 0:
            logprobs = [0.0] * len(ids)  # a point mass, as in `draw`; vLLM gives the softmax
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        return Completion(tuple(ids), tuple(logprobs), text, "EOS" if ids[-1] in self.end_ids else "TRUNCATED")

    def watch(self, has_failed: bool) -> None:
        """Within seconds of its death, or of a silence of `SILENCE_S`."""
        if self.process is not None:
            self.process.check(DEATH_S if has_failed else 0.0)
        if time.monotonic() - self._looked < HEALTH_S and not has_failed:
            return
        if not self.health.is_answering("/health"):
            said = f"; its log:\n{self.process.tail()}" if self.process is not None else ""
            raise ServerError(f"the vLLM server at {self.client.url} is not healthy or silent for {SILENCE_S:g} s{said}")
        self._looked = time.monotonic()

    def close(self) -> None:
        """End the server if it was started here."""
        if self.process is not None:
            self.process.stop()
