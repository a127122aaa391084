"""Run by test_sharding.py in each of two or four processes: sharded models against unsharded ones."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from rla_lightning.metrics import JudgeMetrics, RolloutMetrics
from rla_lightning.models.language_model import load_language_model, load_trainable_state, share_language_model, trainable_state
from rla_lightning.models.muon import muon_and_adamw
from rla_lightning.models.sharding import (
    _like,
    decoder_blocks,
    full_tensor,
    hybrid_mesh,
    shard,
    shard_together,
    sync_replica,
    training_copies,
    unsharded_state,
)
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.models.value_model import load_value_model, share_value_model
from rla_lightning.types import WON, Completion, Judgment, Observation, RolloutGroup, Step, StepLabel, Task, Trajectory

WORDS = [f"w{index}" for index in range(20)]
TINY = TinySpec(width=16, layers=2, heads=2, mlp_width=32)
LORA = LoraSpec(rank=2, target_modules=["q_proj", "down_proj"])
IDS = torch.randint(6, 28, (4, 7), generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    if isinstance(output, torch.Tensor):  # the value model
        return (output - 1).square().mean()
    logprobs = output.logits[:, :-1].float().log_softmax(-1)
    return -logprobs.gather(-1, ids[:, 1:, None]).mean()


def mine() -> torch.Tensor:
    """This process's rows of the batch."""
    return IDS.chunk(dist.get_world_size())[dist.get_rank()]


def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], ids: torch.Tensor) -> float:
    value = loss(model, ids)
    value.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return value.item()


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)]


def compare(name: str, plain: nn.Module, mesh: DeviceMesh) -> None:
    """Three AdamW steps on parts of a batch (sharded) equal three steps on the batch (plain)."""
    model, replica = copy.deepcopy(plain), copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.zero_()  # the first sync must bring every weight
    assert shard(model, mesh) is model
    assert all(isinstance(block, FSDPModule) for block in decoder_blocks(model))
    assert shard(model, mesh) is model  # idempotent
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    sync_replica(replica, model)
    assert torch.equal(loss(replica, IDS), loss(plain, IDS))

    optimizers, plain_optimizers = adamw(model), adamw(plain)
    for _ in range(3):
        update(model, optimizers, mine())
        update(plain, plain_optimizers, IDS)
    full = unsharded_state(model)
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(full[key], tensor, atol=1e-5, rtol=0, msg=lambda text, key=key: f"{name} {key}: {text}")

    before = loss(replica, IDS).item()
    sync_replica(replica, model)
    now = loss(replica, IDS).item()
    assert abs(before - now) > 1e-3, name
    torch.testing.assert_close(loss(model, IDS).item(), now, atol=1e-6, rtol=1e-6)

    saved = {key: full_tensor(tensor) for key, tensor in trainable_state(model).items()}
    update(model, optimizers, IDS)
    load_trainable_state(model, saved)  # full tensors into shards
    torch.testing.assert_close(loss(model, IDS).item(), now, atol=1e-6, rtol=1e-6)


def check_bfloat16(mesh: DeviceMesh) -> None:
    """bfloat16 bases with float32 heads and adapters, and float32 weights that compute in bfloat16."""
    mixed = load_value_model(ValueModelSpec(tiny=TINY, dtype="bfloat16", lora=LORA), WORDS, "m").model
    assert {parameter.dtype for parameter in mixed.parameters()} == {torch.bfloat16, torch.float32}
    master = load_value_model(ValueModelSpec(tiny=TINY), WORDS, "m").model
    for model, dtype in ((mixed, None), (master, torch.bfloat16)):
        shard(model, mesh, dtype)
        optimizers = adamw(model)
        first = update(model, optimizers, mine())
        assert update(model, optimizers, mine()) < first
        assert model.head.weight.dtype == torch.float32


def check_shared_base(mesh: DeviceMesh, recomputes: bool) -> None:
    """Three models on one base, whose updates follow each other, and copies of them to sample from."""
    spec = LanguageModelSpec(tiny=TINY, lora=LORA, gradient_checkpointing=recomputes)
    policy = load_language_model(spec, WORDS, "c")
    judge = share_language_model(policy, spec, "j").model
    critic = share_value_model(policy, ValueModelSpec(lora=LoraSpec(rank=4), gradient_checkpointing=recomputes), "v").model
    plain = [policy.model, judge, critic]
    models, replicas = training_copies(plain, mesh, None), training_copies(plain, mesh, None)
    shard_together(models, mesh)
    parameters = {*models[0].parameters(), *models[1].parameters(), *models[2].parameters()}
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in nn.ModuleList(plain).parameters())
    optimizers, plain_optimizers = [adamw(model) for model in models], [adamw(model) for model in plain]
    for _ in range(3):
        for model, alone, own, alone_own in zip(models, plain, optimizers, plain_optimizers, strict=True):
            with torch.no_grad():  # as old log-probs are computed
                torch.testing.assert_close(loss(model, IDS), loss(alone, IDS), atol=1e-5, rtol=1e-5)
            update(model, own, mine())
            update(alone, alone_own, IDS)
    for model, alone, replica in zip(models, plain, replicas, strict=True):
        full = unsharded_state(model)
        for key, tensor in alone.state_dict().items():
            torch.testing.assert_close(full[key], tensor, atol=1e-5, rtol=0)
        sync_replica(replica, model)
        torch.testing.assert_close(loss(replica, IDS), loss(model, IDS), atol=1e-6, rtol=1e-6)


def check_muon(mesh: DeviceMesh) -> None:
    plain = load_language_model(LanguageModelSpec(tiny=TINY), WORDS, "c").model
    model = shard(copy.deepcopy(plain), mesh)
    optimizers, plain_optimizers = muon_and_adamw(model), muon_and_adamw(plain)
    update(model, optimizers, mine())
    update(plain, plain_optimizers, IDS)
    torch.testing.assert_close(loss(model, IDS).item(), loss(plain, IDS).item(), atol=0.03, rtol=0)  # bfloat16 inside Muon


def check_metrics(rank: int) -> None:
    """A rank without data neither hangs nor changes the values."""
    task, completion = Task("t", "toy", {}, 0.5, "t"), Completion((1,), (0.0,), "", "EOS")
    steps = tuple(Step((1,), completion, Observation(""), "a", True, label=StepLabel(label)) for label in (1, -1))
    votes = tuple((Judgment((1,), completion, 1), Judgment((1,), completion, score)) for score in (1, -1))
    group = RolloutGroup(task, (Trajectory(task, steps, WON, "DONE"),), (votes,))
    judge, rollout = JudgeMetrics(), RolloutMetrics()
    for ranks, copies in (((0,), 1), ((0, 1), 2)):
        for metric in (judge, rollout):
            metric.reset()
            if rank in ranks:
                metric.update([group])
        assert judge.compute()["auc"].item() == 1.0
        assert judge.compute()["true_negative_rate"].item() == 0.5
        assert rollout.compute()["mean_turns"].item() == 2.0
        with rollout.sync_context():
            assert rollout.steps.item() == 2 * copies


def check_copies(mesh: DeviceMesh) -> None:
    """Two copies of weights in two shards each: what is where, and the norm of the gradients."""
    plain = load_language_model(LanguageModelSpec(tiny=TINY), WORDS, "c").model
    model = shard(copy.deepcopy(plain), mesh)
    loss(plain, IDS).backward()
    loss(model, mine()).backward()
    for (name, parameter), alone in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.placements == (Replicate(), Shard(0)), name
        assert parameter.to_local().shape[0] <= -(-alone.shape[0] // 2), name
        torch.testing.assert_close(full_tensor(parameter.grad), alone.grad, atol=1e-6, rtol=1e-4)
    norms = [full_tensor(nn.utils.clip_grad_norm_(part.parameters(), 0.1)) for part in (model, plain)]
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(full_tensor(model.lm_head.weight.grad), plain.lm_head.weight.grad, atol=1e-6, rtol=1e-4)
    assert mesh["data_parallel"].size() == 4
    assert mesh["data_parallel"].get_local_rank() == dist.get_rank()  # of which Lightning makes a sampler
    assert mesh["tensor_parallel"].size() == 1


def check_restored(mesh: DeviceMesh) -> None:
    """A state in one file becomes each process's part of it without communication."""
    plain = load_language_model(LanguageModelSpec(tiny=TINY), WORDS, "c").model
    model = shard(copy.deepcopy(plain), mesh)
    for saved, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        restored = _like(saved.detach(), parameter)
        assert restored.placements == parameter.placements
        assert torch.equal(restored.to_local(), parameter.to_local())


def check_sampling_dtype(mesh: DeviceMesh) -> None:
    """A copy in bfloat16 is that of the weights as they are now, its positions still float32."""
    for spec in (LanguageModelSpec(tiny=TINY), LanguageModelSpec(tiny=TINY, lora=LORA)):
        played = load_language_model(spec, WORDS, "c").model
        model = shard(training_copies([played], mesh, "bfloat16")[0], mesh)
        optimizers = adamw(model)
        sync_replica(played, model)
        update(model, optimizers, mine())
        sync_replica(played, model)
        assert {parameter.dtype for parameter in played.parameters()} == {torch.bfloat16}
        assert {buffer.dtype for buffer in played.buffers()} == {torch.float32}
        state = unsharded_state(model)
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in played.state_dict().items())


def start(rank: int, processes: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)


def two(rank: int, store: str) -> None:
    """One copy in two shards."""
    start(rank, 2, store)
    mesh = init_device_mesh("cpu", (2,))
    compare("full", load_language_model(LanguageModelSpec(tiny=TINY), WORDS, "c").model, mesh)
    compare("lora", load_language_model(LanguageModelSpec(tiny=TINY, lora=LORA), WORDS, "c").model, mesh)
    compare("value", load_value_model(ValueModelSpec(tiny=TINY), WORDS, "c").model, mesh)
    check_bfloat16(mesh)
    check_muon(mesh)
    check_restored(mesh)
    check_sampling_dtype(mesh)
    for recomputes in (False, True):
        check_shared_base(mesh, recomputes)
    check_metrics(rank)
    dist.destroy_process_group()


def four(rank: int, store: str) -> None:
    """Two copies in two shards each."""
    start(rank, 4, store)
    mesh = hybrid_mesh("cpu", 2, 2)
    check_copies(mesh)
    compare("full", load_language_model(LanguageModelSpec(tiny=TINY), WORDS, "c").model, mesh)
    compare("lora", load_language_model(LanguageModelSpec(tiny=TINY, lora=LORA), WORDS, "c").model, mesh)
    check_restored(mesh)
    check_muon(mesh)
    check_shared_base(mesh, recomputes=False)
    dist.destroy_process_group()
