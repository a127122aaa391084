"""Policy, reward model and critic on one frozen base: as three separate models, but with the base in memory once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from rla_lightning.checkpoints import require_continues
from rla_lightning.environments.base import Environment
from rla_lightning.models.language_model import evaluating, load_language_model, share_language_model, trainable_state
from rla_lightning.models.sharding import sync_replica, training_copies
from rla_lightning.models.sizes import ModelSize, model_sizes
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec, on_policy_base
from rla_lightning.models.value_model import ValueModel, load_value_model, share_value_model
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.batching import Sample, batch_of
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import ConfigError, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*")

WORDS = [f"w{index}" for index in range(20)]
TINY = TinySpec(width=16, layers=2, heads=2, mlp_width=32, context_length=40)
LORA = LoraSpec(rank=2, alpha=16)
NAMES = ("policy", "reward_model", "critic")
BASE = 28 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 3 * 16 + 2 * 16) + 16  # embedding, matrices, biases and norms
ADAPTERS = 2 * 2 * (4 * (16 + 16) + 3 * (16 + 32))  # rank 2 in 2 layers
IDS = torch.tensor([[8, 9, 10, 3], [11, 12, 13, 3]])


class Words(Environment):
    name = "words"

    def vocabulary(self) -> tuple[str, ...]:
        return tuple(WORDS)

    def sample(self, rng, difficulty, split="in_domain"):
        raise NotImplementedError

    def start(self, task):
        raise NotImplementedError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a pretrained model."""
    folder = tmp_path_factory.mktemp("pretrained")
    loaded = load_language_model(LanguageModelSpec(tiny=TINY), WORDS, "weights")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def loop_of(base: str, path: str, **options: Any) -> ClosedLoop:
    lm = LanguageModelSpec(path=path, lora=LORA)
    models = {
        "policy": lm,
        "reward_model": replace(lm, base=base),
        "critic": ValueModelSpec(path=path, lora=LORA, base=base),
    }
    optimizers = {f"{name}_optimizer": partial(torch.optim.AdamW, lr=1e-2) for name in models}
    loop = ClosedLoop(Words(), **{**models, **optimizers, **options})
    loop.configure_model()
    return loop


def losses(loop: ClosedLoop) -> dict[str, Callable[[], Tensor]]:
    samples = [Sample((8, 9), (10, 11), 1.0), Sample((8, 9), (12,), -1.0), Sample((13,), (14, 2), 0.5)]
    batch = batch_of(samples, 0)

    def scored(name: str) -> Tensor:
        logprobs, _ = getattr(loop, name)(batch, 0.7)
        return -(logprobs * batch.response_mask * batch.advantages[:, None]).sum()

    return {
        "policy": partial(scored, "policy"),
        "reward_model": partial(scored, "reward_model"),
        "critic": lambda: (loop.critic(IDS, torch.ones_like(IDS)) - 1).square().sum(),
    }


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("recomputes", [False, True])
def test_updates_equal_those_of_separate_models(path: str, recomputes: bool) -> None:
    """All three are run before any of them goes backward, which is where one active adapter at a time would fail."""
    specs = {
        "policy": LanguageModelSpec(path=path, lora=LORA, gradient_checkpointing=recomputes),
        "reward_model": LanguageModelSpec(path=path, lora=LoraSpec(rank=4), gradient_checkpointing=recomputes),
        "critic": ValueModelSpec(path=path, lora=LORA),
    }
    shared = {"reward_model": replace(specs["reward_model"], base="policy"), "critic": replace(specs["critic"], base="policy")}
    loops = [loop_of("own", path, **specs), loop_of("own", path, **{**specs, **shared})]
    optimizers = [loop.configure_optimizers()[0] for loop in loops]
    for _ in range(3):
        for loop, own in zip(loops, optimizers, strict=True):
            values = [loss() for loss in losses(loop).values()]
            for value in values:
                value.backward()
            for optimizer in own:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(*loops)
    assert all(tensor.any() for name, tensor in loops[1].state_dict().items() if "lora_B" in name)  # 0 at first


def test_the_base_is_held_once(path: str) -> None:
    separate, shared = loop_of("own", path), loop_of("policy", path)
    head = 2 * 16 + 1
    assert sum(p.numel() for p in separate.parameters()) == 3 * (BASE + ADAPTERS) + head
    assert sum(p.numel() for p in shared.parameters()) == BASE + 3 * ADAPTERS + head
    decoder = BASE  # the output layer is the embedding
    assert model_sizes({name: getattr(shared, name) for name in NAMES}, ("policy", "critic")) == {
        "policy": ModelSize(ADAPTERS, BASE, 0, 4 * (BASE + ADAPTERS)),
        "reward_model": ModelSize(0, ADAPTERS, BASE, 4 * ADAPTERS),
        "critic": ModelSize(ADAPTERS + head, 0, decoder, 4 * (ADAPTERS + head)),
    }


def test_checkpoints_have_the_adapters_and_the_keys_of_separate_models(path: str) -> None:
    separate, shared = loop_of("own", path), loop_of("policy", path)
    assert separate.state_dict().keys() == shared.state_dict().keys()
    weights = {name for name in shared.state_dict() if name.startswith(NAMES)}
    assert weights == {name for name in weights if "lora_" in name or name.startswith("critic.head.")}
    assert len(weights) == 3 * 2 * 2 * 7 + 2
    assert_equal(separate, shared)  # the same initial adapters


def test_only_its_own_adapter_is_trained(path: str) -> None:
    loop = loop_of("policy", path)
    optimizers = loop.configure_optimizers()[0]
    owned = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    assert [sum(p.numel() for p in parameters) for parameters in owned] == [ADAPTERS, ADAPTERS, ADAPTERS + 33]
    assert not owned[0] & owned[1]
    assert not (owned[0] | owned[1]) & owned[2]
    losses(loop)["policy"]().backward()
    assert all((p.grad is not None) == (p in owned[0]) for p in loop.parameters())


def test_policy_and_judge_sample_alternately(path: str) -> None:
    params = SamplingParams(temperature=0.0, top_p=1.0, max_new_tokens=6)
    prompts, keys = [(8, 9), (10, 11)], ["a", "b"]

    def answers(loop: ClosedLoop) -> list[Any]:
        with torch.no_grad():
            for name, module in loop.named_parameters():
                if "lora_B" in name:
                    module.copy_(torch.linspace(-1, 1, module.numel()).view_as(module) * (2 if name.startswith("policy") else -1))
        samplers = (loop.players.policy_sampler, loop.players.judge_sampler)
        return [sampler.sample(prompts, 1, params, keys) for _ in range(2) for sampler in samplers]

    shared = answers(loop_of("policy", path))
    assert shared == answers(loop_of("own", path))
    assert shared[:2] == shared[2:]
    assert shared[0] != shared[1]


def test_training_flags_are_each_models_own(path: str) -> None:
    loop = loop_of("policy", path)
    with evaluating(loop.policy):
        assert not any(module.training for module in loop.policy.modules())
        assert all(module.training for name in NAMES[1:] for module in getattr(loop, name).modules())
    assert all(module.training for module in loop.modules())
    loop.critic.requires_grad_(False)
    assert any(p.requires_grad for p in loop.policy.parameters())


def test_a_frozen_judge_is_the_bare_base(path: str) -> None:
    loop = loop_of("policy", path, reward_model=LanguageModelSpec(base="policy"), reward_model_optimizer=None)
    judge = loop.players.reward_model.model
    assert not isinstance(judge, PeftModel)
    assert {*judge.parameters()} == {p for p in loop.policy.parameters() if not p.requires_grad}
    assert not [name for name in loop.state_dict() if name.startswith("reward_model")]
    plain = load_language_model(LanguageModelSpec(path=path), (), "x").model
    losses(loop)["policy"]().backward()
    loop.configure_optimizers()[0][0].step()
    loop.sync_players()
    assert torch.equal(judge(IDS).logits, plain(IDS).logits)
    assert not torch.equal(loop.policy.model(IDS).logits, plain(IDS).logits)


def test_copies_to_sample_from_have_one_base_too(path: str) -> None:
    policy = load_language_model(LanguageModelSpec(path=path, lora=LORA), (), "a")
    judge = share_language_model(policy, LanguageModelSpec(lora=LORA), "b")
    critic = share_value_model(policy, ValueModelSpec(lora=LORA), "c")
    played = nn.ModuleList([policy.model, judge.model, critic.model])
    trained = nn.ModuleList(training_copies([*played], None, "bfloat16"))
    for models in (played, trained):
        assert sum(p.numel() for p in models.parameters()) == BASE + 3 * ADAPTERS + 33
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert {p.dtype for p in [*policy.model.parameters(), *judge.model.parameters()]} == {torch.bfloat16}
    assert {p.dtype for p in trainable_state(critic.model).values()} == {torch.float32}
    assert not {*played.parameters()} & {*trained.parameters()}
    for parameter in trainable_state(trained[1]).values():
        parameter.add_(0.1)
    for replica, model in zip(played, trained, strict=True):
        sync_replica(replica, model)
    now = dict(judge.model.named_parameters())
    assert all(torch.equal(now[name], p.bfloat16()) for name, p in trained[1].named_parameters())
    assert all(tensor.ne(0).any() for name, tensor in now.items() if "lora_B" in name)


def test_tiny_models_share_a_random_base() -> None:
    policy = load_language_model(LanguageModelSpec(tiny=TINY, lora=LORA), WORDS, "a")
    judges = [share_language_model(policy, LanguageModelSpec(lora=LORA), key).model for key in "bbc"]
    states = [trainable_state(judge) for judge in judges]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert any(not torch.equal(tensor, states[2][name]) for name, tensor in states[0].items())
    critic = share_value_model(policy, ValueModelSpec(lora=LORA), "d").model
    assert isinstance(critic, ValueModel)
    assert critic.encoder.get_base_model().embed_tokens.weight is policy.model.get_base_model().model.embed_tokens.weight
    assert torch.equal(judges[0](IDS).logits, policy.model(IDS).logits)  # adapters start at 0
    Scorer(judges[0])
    TransformersSampler(judges[0], policy.tokenizer).sample([(8,)], 1, SamplingParams(1.0, 1.0, 2), ["k"])
    own = load_value_model(ValueModelSpec(tiny=TINY, lora=LORA), WORDS, "d").model
    assert own.state_dict().keys() == critic.state_dict().keys()


def test_what_the_policys_base_does_not_have_is_refused(path: str) -> None:
    policy = LanguageModelSpec(path=path, lora=LORA, dtype="bfloat16")
    judge = LanguageModelSpec(base="policy", lora=LORA)
    assert on_policy_base("reward_model", judge, policy) == replace(judge, path=path, dtype="bfloat16")
    assert on_policy_base("reward_model", replace(judge, path=path), policy).path == path
    for given in ({"path": "org/other"}, {"tiny": TINY}, {"weights": False, "path": path, "lora": None}):
        with pytest.raises(ConfigError, match=rf"model\.reward_model\.{next(iter(given))} is .*the policy's"):
            on_policy_base("reward_model", replace(judge, **given), policy, may_be_bare=True)
    with pytest.raises(ConfigError, match=r"set model\.policy\.lora"):
        on_policy_base("critic", ValueModelSpec(base="policy", lora=LORA), replace(policy, lora=None))
    with pytest.raises(ConfigError, match=r"set model\.critic\.lora"):
        on_policy_base("critic", ValueModelSpec(base="policy"), policy)
    with pytest.raises(ConfigError, match=r"model\.policy\.base"):
        loop_of("own", path, policy=replace(policy, base="policy"))


def test_a_bare_judge_cannot_be_trained(path: str) -> None:
    with pytest.raises(ConfigError, match=r"set model\.reward_model\.lora"):
        loop_of("policy", path, reward_model=LanguageModelSpec(base="policy"))


@pytest.mark.parametrize(("saved", "loaded", "was"), [("own", "policy", "own"), ("policy", "own", "policy")])
def test_adapters_of_another_random_base_are_refused(saved: str, loaded: str, was: str) -> None:
    def made(base: str) -> ClosedLoop:
        lm = LanguageModelSpec(tiny=TINY, lora=LORA)
        critic = ValueModelSpec(tiny=TINY, lora=LORA, base=base)
        loop = ClosedLoop(Words(), policy=lm, reward_model=replace(lm, base=base), critic=critic)
        loop.configure_model()
        return loop

    with pytest.raises(ConfigError, match=rf"critic belong to other random weights: model\.critic\.base was {was}"):
        resume(made(saved), made(loaded))
    resume(made(saved), made(saved))


def test_checkpoints_of_a_pretrained_base_fit_both_ways(path: str) -> None:
    shared, separate = loop_of("policy", path), loop_of("own", path)
    resume(separate, shared)
    resume(shared, separate)


def resume(saved: ClosedLoop, loop: ClosedLoop) -> None:
    checkpoint = {"state_dict": saved.state_dict(), "optimizers_of": NAMES, "seed": 0, "on_random_base": saved.on_random_base}
    require_continues(checkpoint, loop.state_dict(), NAMES, 0, loop.on_random_base, True)
