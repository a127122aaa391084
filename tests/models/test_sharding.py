import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.sharding import decoder_blocks, sync_replica, unsharded_state
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec

TINY = TinySpec(width=16, layers=3, heads=2, mlp_width=32)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Forward, backward, AdamW, replicas and restoring on two gloo processes; see two_processes.py."""
    script = str(Path(__file__).with_name("two_processes.py"))
    command = [sys.executable, "-W", "ignore", script]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all("all equal" in output for output in outputs), "\n".join(outputs)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)])
def test_blocks_are_the_decoder_layers(lora: LoraSpec | None) -> None:
    model = load_language_model(LanguageModelSpec(tiny=TINY, lora=lora), ["w"], "a").model
    assert [type(block).__name__ for block in decoder_blocks(model)] == ["Qwen2DecoderLayer"] * 3


def test_replica_of_a_plain_model() -> None:
    model = load_language_model(LanguageModelSpec(tiny=TINY), ["w"], "a").model
    replica = load_language_model(LanguageModelSpec(tiny=TINY), ["w"], "b").model
    ids = torch.tensor([[6, 7, 3]])
    sync_replica(replica, model)
    assert torch.equal(replica(ids).logits, model(ids).logits)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert not torch.equal(replica(ids).logits, model(ids).logits)
    sync_replica(replica, model)
    assert torch.equal(replica(ids).logits, model(ids).logits)
    assert set(unsharded_state(model)) == set(model.state_dict())


def test_replica_of_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        sync_replica(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))


def test_a_new_replica_gets_every_weight_of_a_lora_model() -> None:
    model = load_language_model(LanguageModelSpec(tiny=TINY, lora=LoraSpec(rank=2)), ["w"], "a").model
    first = copy.deepcopy(model)
    sync_replica(first, model)
    with torch.no_grad():
        for parameter in (first_parameters := list(first.parameters())):
            parameter.zero_()
    sync_replica(first, model)  # adapters only from now on
    assert sum(bool(parameter.any()) for parameter in first_parameters) == 3 * 7  # A of 7 linear layers; B starts at zero
    second = copy.deepcopy(first)
    sync_replica(second, model)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), model.parameters(), strict=True))
