"""One optimizer update of tiny models, under a real Trainer (its optimizers, its backward pass)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from rla_lightning.algorithm.losses import LossOutput, policy_loss, value_loss
from rla_lightning.environments.base import Environment
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.module import ClosedLoop
from rla_lightning.optimization import averages, optimize
from rla_lightning.rollout.batching import Sample, batch_of
from rla_lightning.settings import ClippedUpdateSettings, RolloutSettings
from rla_lightning.types import Completion
from rla_lightning.updates import TaskSample, ValueSample, pieces, value_pieces

TINY = TinySpec(width=16, layers=1, heads=2, mlp_width=32, context_length=32)
FULL = LanguageModelSpec(tiny=TINY)
LORA = LanguageModelSpec(tiny=TINY, lora=LoraSpec(rank=2, alpha=16))
SGD = partial(torch.optim.SGD, lr=0.5)
CPU = torch.device("cpu")
ONE_STEP = ClippedUpdateSettings(minibatches=1)

pytestmark = pytest.mark.filterwarnings("ignore:.*You defined a .validation_step.", "ignore:.*is_gradient_checkpointing.*")


class Words(Environment):
    name = "words"

    def vocabulary(self) -> tuple[str, ...]:
        return tuple("abcdefghijklmnopqrst")

    def sample(self, rng, difficulty, split="in_domain"):
        raise NotImplementedError

    def start(self, task):
        raise NotImplementedError


class Probe(ClosedLoop):
    """Calls `body` instead of an iteration."""

    body: Callable[["Probe"], None]

    def training_step(self, batch, batch_idx):
        self.body(self)

    def on_train_epoch_end(self):
        pass


class OneBatch(L.LightningDataModule):
    tasks = ()
    adapter = None

    def lend(self, policy):
        pass

    def train_dataloader(self):
        return CombinedLoader([[0]])


def run(body: Callable[[Probe], None], **options) -> Probe:
    """Run `body` inside the training step of a fresh ClosedLoop; equal options give equal weights."""
    models = {"policy": FULL, "reward_model": FULL, "critic": ValueModelSpec(tiny=TINY)}
    optimizers = {f"{name}_optimizer": SGD for name in models}
    loop = Probe(Words(), **{**models, **optimizers, "rollout": RolloutSettings(temperature=0.7, top_p=0.9), **options})
    loop.body = body
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(loop, OneBatch())
    return loop


def sampled(loop: ClosedLoop, number: int = 6) -> list[TaskSample]:
    """What the policy itself samples, prompts of 1 to `number` tokens, advantages of both signs."""
    prompts = [tuple(range(8, 9 + length)) for length in range(number)]
    answers = loop.players.policy_sampler.sample(prompts, 1, loop.rollout.policy_sampling, [f"k{i}" for i in range(number)])
    return [
        TaskSample(Sample(prompt, answer.token_ids, (-1.0) ** i * (1 + i / 4)), f"task{i}", answer.logprobs)
        for i, (prompt, (answer,)) in enumerate(zip(prompts, answers, strict=True))
    ]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def distance(before: dict[str, Tensor], model: torch.nn.Module) -> float:
    after = weights(model)
    return math.sqrt(sum(float((after[name] - tensor).double().square().sum()) for name, tensor in before.items()))


def model_logprobs(loop: ClosedLoop, answers: Sequence[tuple[tuple[int, ...], Completion]]) -> Tensor:
    """Of all sampled tokens, one after the other."""
    batch = batch_of([Sample(prompt, answer.token_ids, 0.0) for prompt, answer in answers], 0)
    with torch.no_grad():
        logprobs, _ = loop.policy(batch, loop.rollout.temperature)
    return logprobs[batch.response_mask.bool()]


# The ratio


@pytest.mark.parametrize("spec", [FULL, LORA], ids=["full", "lora"])
def test_the_first_ratio_is_exactly_one_at_any_temperature_and_top_p(spec):
    """The sampler's own log-probs, after top_p, differ; the trainer's do not."""
    gaps, first = [], {}

    def body(loop: Probe) -> None:
        steps = pieces(sampled(loop), replace(ONE_STEP, token_budget=30), Random(0), 0, CPU)
        with torch.no_grad():
            old = {id(piece): loop.policy(piece.batch, 0.7)[0] for piece in steps[0]}

        def loss(piece) -> LossOutput:
            logprobs, _ = loop.policy(piece.batch, 0.7)
            gaps.append(float((logprobs.detach() - old[id(piece)]).abs().max()))
            batch = piece.batch
            return policy_loss(
                logprobs, old[id(piece)], batch.advantages, batch.response_mask, denominator=piece.denominator, kl_coef=0.0
            )

        first.update(optimize(loop, "policy", loop._optimizers["policy"], steps, loss, ONE_STEP))

    run(body, policy=spec)
    assert gaps == [0.0] * len(gaps)
    assert len(gaps) > 1
    assert (first["approx_kl"], first["clip_fraction"], first["optimizer_steps"]) == (0.0, 0.0, 1)
    # every ratio is 1 and there is no KL, so the loss is -mean A of the six samples:
    # 1, -1.25, 1.5, -1.75, 2, -2.25 sum to -.75, so .75 / 6 = .125
    assert first["loss"] == pytest.approx(0.125, abs=1e-6)


def test_the_loop_reports_a_kl_of_zero_and_the_gap_to_the_sampler():
    reports = {}

    def body(loop: Probe) -> None:
        reports["top_p"] = loop._update_language_model("policy", sampled(loop), ONE_STEP, "k")

    run(body)
    assert reports["top_p"]["policy/approx_kl"] == 0.0
    assert reports["top_p"]["policy/clip_fraction"] == 0.0
    assert reports["top_p"]["policy/sampler_gap"] > 0.01  # a nucleus of .9 raises what is inside it by up to -log .9 = .105
    assert reports["top_p"]["policy/sampler_gap"] < 0.1055
    assert reports["top_p"]["policy/samples"] == 6


def test_without_filters_the_sampler_and_the_trainer_agree():
    reports = {}
    run(
        lambda loop: reports.update(loop._update_language_model("policy", sampled(loop), ONE_STEP, "k")),
        rollout=RolloutSettings(temperature=0.7),
    )
    assert reports["policy/sampler_gap"] < 1e-5


# Gradients


def test_updates_are_equal_for_any_token_budget():
    """The loss scale must not depend on the micro-batch split."""
    ends, losses = [], []
    for budget in (1, 24, 10**6):
        settings = ClippedUpdateSettings(minibatches=2, update_epochs=2, token_budget=budget, ent_coef=0.01)

        def body(loop: Probe, settings: ClippedUpdateSettings = settings) -> None:
            losses.append(loop._update_language_model("policy", sampled(loop), settings, "k"))
            states = [ValueSample(tuple(range(8, 9 + n)), (-1.0) ** n, "t") for n in range(5)]
            steps = value_pieces(states, settings, Random(0), 0, CPU)
            assert (len(steps[0]) > 1) is (settings.token_budget == 1)

        loop = run(body)
        ends.append(weights(loop.policy))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, atol=1e-6, rtol=0)
        torch.testing.assert_close(ends[2][name], tensor, atol=1e-6, rtol=0)
    assert losses[0]["policy/optimizer_steps"] == 4
    assert losses[0]["policy/approx_kl"] > 0
    for other in losses[1:]:  # the gradient's norm is 5.7, in float32
        assert losses[0] == pytest.approx(other, abs=1e-5, rel=5e-6)


def test_the_gradient_is_clipped_to_its_norm():
    reports, moved = {}, []

    def body(loop: Probe) -> None:
        before = weights(loop.policy)
        reports.update(loop._update_language_model("policy", sampled(loop), replace(ONE_STEP, max_grad_norm=0.001), "k"))
        moved.append(distance(before, loop.policy))

    run(body, policy_optimizer=partial(torch.optim.SGD, lr=1.0))
    assert reports["policy/grad_norm"] > 0.01  # logged as it was before
    assert moved[0] == pytest.approx(0.001, rel=1e-2)


def test_gradients_do_not_pile_up_over_optimizer_steps():
    moved = []
    for epochs in (1, 2):

        def body(loop: Probe, epochs: int = epochs) -> None:
            before = weights(loop.policy)
            settings = ClippedUpdateSettings(minibatches=1, update_epochs=epochs, max_grad_norm=1e9)
            loop._update_language_model("policy", sampled(loop), settings, "k")
            moved.append(distance(before, loop.policy))

        run(body, policy_optimizer=partial(torch.optim.SGD, lr=1e-4))
    assert moved[1] == pytest.approx(2 * moved[0], rel=0.05)  # nearly the same gradient twice; piled up it would be 3 times


def test_target_kl_ends_the_update_and_reports_it():
    reports = {}
    settings = ClippedUpdateSettings(minibatches=1, update_epochs=5, target_kl=1e-6, kl_coef=0.0)
    run(lambda loop: reports.update(loop._update_language_model("policy", sampled(loop), settings, "k")))
    # the first step starts at a KL of 0, the second sees what the first did and is not taken
    assert (reports["policy/optimizer_steps"], reports["policy/stopped_early"]) == (1, 1)
    relaxed = replace(settings, target_kl=1e6)
    run(lambda loop: reports.update(loop._update_language_model("policy", sampled(loop), relaxed, "k")))
    assert (reports["policy/optimizer_steps"], reports["policy/stopped_early"]) == (5, 0)


def test_an_update_whose_second_step_is_not_taken_is_reported():
    """Dropout makes ratios differ from 1 where the old log-probs come from a forward pass of their own."""
    reports = {}
    spec = replace(LORA, lora=LoraSpec(rank=2, alpha=64, dropout=0.5))
    settings = ClippedUpdateSettings(minibatches=2, target_kl=1e-6)

    def body(loop: Probe) -> None:
        for name, parameter in loop.policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data)
        reports.update(loop._update_language_model("policy", sampled(loop), settings, "k"))

    run(body, policy=spec, policy_optimizer=partial(torch.optim.SGD, lr=0.0))
    assert (reports["policy/optimizer_steps"], reports["policy/stopped_early"]) == (1, 1)
    assert reports["policy/max_kl"] > 1e-6


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_task_and_changes_nothing(poison):
    """One poisoned number must not reach the weights."""
    seen = []

    def body(loop: Probe) -> None:
        samples = sampled(loop)
        samples[2] = replace(samples[2], sample=replace(samples[2].sample, advantage=poison))
        before = weights(loop.policy)
        with pytest.raises(FloatingPointError, match="the policy update is not finite") as caught:
            loop._update_language_model("policy", samples, replace(ONE_STEP, token_budget=1), "k")
        seen.append(str(caught.value))
        assert distance(before, loop.policy) == 0.0
        assert all(parameter.grad is None for parameter in loop.policy.parameters())
        assert all(parameter.requires_grad for parameter in loop.reward_model.parameters())

    run(body)
    assert seen[0].endswith("tasks: task2")


def test_samples_without_tokens_are_a_no_op_even_with_momentum():
    """An all-masked batch has a gradient of 0, which AdamW would still turn into a step."""
    moved, reports = [], {}

    def body(loop: Probe) -> None:
        loop._update_language_model("policy", sampled(loop), ONE_STEP, "k")
        before = weights(loop.policy)
        nothing = [TaskSample(Sample((8, 9), (), 1.0), "empty", ()) for _ in range(3)]
        with pytest.warns(UserWarning, match="policy.*no token.*empty"):
            reports.update(loop._update_language_model("policy", nothing, ONE_STEP, "k"))
        moved.append(distance(before, loop.policy))

    run(body, policy_optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1))
    assert moved == [0.0]
    assert reports["policy/optimizer_steps"] == 0
    assert not any(math.isnan(value) for value in reports.values())


def test_one_sample_without_tokens_does_not_disturb_the_others():
    ends = []
    for extra in ([], [TaskSample(Sample((8, 9), (), 5.0), "empty", ())]):

        def body(loop: Probe, extra: list[TaskSample] = extra) -> None:
            samples = sampled(loop) + extra
            loop._update_language_model("policy", samples, replace(ONE_STEP, max_grad_norm=1e9, kl_coef=0.0), "k")

        ends.append(run(body))
    start = weights(run(lambda loop: None).policy)
    with_all, with_empty = weights(ends[0].policy), weights(ends[1].policy)
    for name, tensor in start.items():  # the denominator counts samples, so the step is 6/7 as long
        torch.testing.assert_close((with_empty[name] - tensor) * 7 / 6, with_all[name] - tensor, atol=1e-6, rtol=1e-4)


def test_without_samples_nothing_happens():
    reports, moved = {}, []

    def body(loop: Probe) -> None:
        before = weights(loop.policy)
        reports.update(loop._update_language_model("policy", [], ONE_STEP, "k"))
        reports.update(loop._update_critic([], "k"))
        moved.append(distance(before, loop.policy))

    run(body)
    assert (reports, moved) == ({"policy/samples": 0.0}, [0.0])


def test_a_frozen_model_stays_as_it_is():
    reports, moved = {}, []

    def body(loop: Probe) -> None:
        before = weights(loop.policy)
        reports.update(loop._update_language_model("policy", sampled(loop), ONE_STEP, "k"))
        moved.append(distance(before, loop.policy))
        assert list(loop._optimizers) == ["reward_model"]

    run(body, policy_optimizer=None, critic_optimizer=None)
    assert (reports, moved) == ({"policy/samples": 6.0}, [0.0])


def test_updating_one_model_leaves_the_others_alone():
    def body(loop: Probe) -> None:
        before = weights(loop.reward_model) | {f"critic.{n}": t for n, t in weights(loop.critic).items()}
        loop._update_language_model("policy", sampled(loop), ONE_STEP, "k")
        after = weights(loop.reward_model) | {f"critic.{n}": t for n, t in weights(loop.critic).items()}
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(parameter.grad is None for parameter in loop.reward_model.parameters())

    run(body)


def test_averages_divide_by_what_was_counted():
    sums = {"loss": 3.0, "grad_norm": 5.0, "optimizer_steps": 2, "stopped_early": 1, "tokens": 40, "approx_kl": 0.2,
            "clip_fraction": 10, "entropy": 80.0, "sampler_gap": 4.0, "max_kl": 0.75}  # fmt: skip
    assert averages(sums) == {
        "loss": 1.5,
        "grad_norm": 2.5,
        "optimizer_steps": 2,
        "stopped_early": 1,
        "approx_kl": 0.005,
        "clip_fraction": 0.25,
        "entropy": 2.0,
        "sampler_gap": 0.1,
        "max_kl": 0.75,
    }
    critic = averages({"loss": 3.0, "grad_norm": 5.0, "optimizer_steps": 2, "stopped_early": 0, "samples": 10, "brier": 2.5})
    assert critic["train_brier"] == 0.25
    nothing = averages({"grad_norm": 0, "optimizer_steps": 0, "stopped_early": 0})
    assert nothing == {"loss": 0.0, "grad_norm": 0.0, "optimizer_steps": 0, "stopped_early": 0}


# After the update


@pytest.mark.parametrize("spec", [FULL, LORA], ids=["full", "lora"])
def test_what_was_learned_reaches_the_sampler(spec):
    """Trained weights must reach the sampler."""
    checked = []

    def body(loop: Probe) -> None:
        prompts = [(8, 9, 10), (11,)]
        answers = loop.players.policy_sampler.sample(prompts, 2, loop.rollout.policy_sampling, ["a", "b"])
        pairs = [(prompt, answer) for prompt, many in zip(prompts, answers, strict=True) for answer in many]
        before = model_logprobs(loop, pairs)
        samples = [TaskSample(Sample(p, a.token_ids, 1.0 + i), "t", a.logprobs) for i, (p, a) in enumerate(pairs)]
        loop._update_language_model("policy", samples, ClippedUpdateSettings(minibatches=1, update_epochs=4, kl_coef=0.0), "k")
        loop.sync_players()
        assert float((model_logprobs(loop, pairs) - before).abs().max()) > 1e-3  # it did learn
        again = loop.players.policy_sampler.sample(prompts, 2, loop.rollout.policy_sampling, ["c", "d"])
        pairs = [(prompt, answer) for prompt, many in zip(prompts, again, strict=True) for answer in many]
        reported = torch.tensor([logprob for _, answer in pairs for logprob in answer.logprobs])
        torch.testing.assert_close(reported, model_logprobs(loop, pairs), atol=1e-5, rtol=0)
        checked.append(len(pairs))

    run(body, policy=spec, rollout=RolloutSettings(temperature=0.7))
    assert checked == [4]


def test_checkpoints_of_lora_models_hold_adapters_only_and_load(tmp_path: Path):
    """Frozen base weights would bloat checkpoints."""

    def body(loop: Probe) -> None:
        loop._update_language_model("policy", sampled(loop), replace(ONE_STEP, update_epochs=3), "k")

    specs = {"policy": LORA, "reward_model": LORA, "critic": ValueModelSpec(tiny=TINY, lora=LoraSpec(rank=2))}
    loop = run(body, **specs)
    loop.trainer.save_checkpoint(tmp_path / "lora.ckpt")
    checkpoint = torch.load(tmp_path / "lora.ckpt", weights_only=True)
    saved = {name for name in checkpoint["state_dict"] if "." in name}
    assert saved
    assert all("lora_" in name or name.startswith("critic.head.") for name in saved)
    assert {"critic.head.weight", "critic.head.bias"} <= saved
    assert {name for name in checkpoint["state_dict"] if "." not in name} == {
        "iteration",
        "tokens_generated",
        "tokens_trained",
    }
    fresh = run(lambda other: None, **specs)
    assert distance(weights(loop.policy), fresh.policy) > 0
    fresh.on_load_checkpoint(checkpoint)
    fresh.load_state_dict(checkpoint["state_dict"], strict=False)
    assert distance(weights(loop.policy), fresh.policy) == 0


def test_a_checkpoint_of_other_models_is_refused():
    loop = run(lambda loop: None)
    other = run(lambda loop: None, policy=LORA)
    with pytest.raises(ValueError, match=r"another architecture: this model has no policy.*lora_A"):
        loop.on_load_checkpoint({"state_dict": other.state_dict()})
    wider = run(lambda loop: None, policy=LanguageModelSpec(tiny=replace(TINY, mlp_width=48)))
    with pytest.raises(ValueError, match=r"mlp.*48.*in the checkpoint, .*32.*in this model"):
        loop.on_load_checkpoint({"state_dict": wider.state_dict()})


def test_sampling_leaves_the_training_forward_as_it_was():
    """Sampling must leave no trace in the model."""

    def body(loop: Probe) -> None:
        pair = ((8, 9, 10), Completion((11, 12, 1), (0.0, 0.0, 0.0), "", "EOS"))
        before = model_logprobs(loop, [pair])
        sampled(loop)
        assert torch.equal(model_logprobs(loop, [pair]), before)
        assert loop.policy.training

    run(body)


def test_the_critic_learns_the_outcomes():
    reports = {}

    def body(loop: Probe) -> None:
        states = [ValueSample((8,), 1.0, "a"), ValueSample((9,), -1.0, "b")] * 4
        settings = ClippedUpdateSettings(minibatches=1, update_epochs=30)
        steps = value_pieces(states, settings, Random(0), 0, CPU)

        def loss(piece):
            logits = loop.critic(piece.batch.input_ids, piece.batch.attention_mask)
            return value_loss(logits, piece.batch.outcomes, denominator=piece.denominator)

        reports.update(optimize(loop, "critic", loop._optimizers["critic"], steps, loss, settings))
        reports["p"] = loop.players.values([(8,), (9,)]).tolist()

    run(body, critic_optimizer=partial(torch.optim.AdamW, lr=0.03))
    assert reports["samples"] == 8 * 30
    assert reports["loss"] / 30 < math.log(2)  # that of the untrained critic, which says .5
    assert reports["p"][0] > 0.8
    assert reports["p"][1] < 0.2
