import copy
import multiprocessing
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.sharding import decoder_blocks, sync_replica, training_copies, unsharded_state
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec

TINY = TinySpec(width=16, layers=3, heads=2, mlp_width=32)


def _process(name: str, rank: int, store: Path) -> None:
    sys.stdout = sys.stderr = store.with_name(f"log-{rank}").open("w", buffering=1)
    runpy.run_path(str(Path(__file__).with_name("two_processes.py")))[name](rank, str(store))


@pytest.mark.parametrize(("name", "processes"), [("two", 2), ("four", 4)])
def test_several_processes_equal_one(name: str, processes: int, tmp_path: Path) -> None:
    """Forward, backward, AdamW, replicas and restoring on gloo processes; see two_processes.py."""
    fork, store = multiprocessing.get_context("fork"), tmp_path / "store"
    workers = [fork.Process(target=_process, args=(name, rank, store)) for rank in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0] * processes, "\n".join(path.read_text() for path in sorted(tmp_path.glob("log-*")))


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


@pytest.mark.parametrize(
    ("spec", "sampling_dtype"),
    [
        (LanguageModelSpec(tiny=TINY), None),
        (LanguageModelSpec(tiny=TINY), "float32"),
        (LanguageModelSpec(tiny=TINY, dtype="bfloat16", lora=LoraSpec(rank=2)), "bfloat16"),  # its adapters are float32
    ],
)
def test_one_process_samples_from_the_trained_model(spec: LanguageModelSpec, sampling_dtype: str | None) -> None:
    model = load_language_model(spec, ["w"], "a").model
    assert training_copies([model], None, sampling_dtype) == [model]


def test_one_process_samples_from_a_copy_in_another_dtype() -> None:
    played = load_language_model(LanguageModelSpec(tiny=TINY), ["w"], "a").model
    (model,) = training_copies([played], None, "bfloat16")
    assert {parameter.dtype for parameter in played.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in played.buffers()} == {torch.float32}  # positions in bfloat16 would be wrong
    assert played.lm_head.weight is played.model.embed_tokens.weight
    with torch.no_grad():
        model.model.norm.weight.mul_(1.001)  # less than one step of bfloat16 at 1
        model.model.embed_tokens.weight.add_(1)
    sync_replica(played, model)
    assert torch.equal(played.lm_head.weight, model.lm_head.weight.bfloat16())
    assert played.model.norm.weight.eq(1).all()
