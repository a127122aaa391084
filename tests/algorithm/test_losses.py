import math

import pytest
import torch

from rla_lightning.algorithm.losses import policy_loss, token_logprobs, value_loss

OLD = torch.full((2, 3), math.log(0.5), dtype=torch.float64)
# ratios: sequence 0: 1.5, 0.5 (third token masked); sequence 1: 1.5 in the middle, the rest masked
NEW = OLD + torch.tensor([[1.5, 0.5, 9.0], [9.0, 1.5, 9.0]], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1, 0], [0, 1, 0]])
ADVANTAGES = torch.tensor([1.0, -2.0])
WEIGHTS = torch.tensor([1.0, 0.5])
ENTROPY = torch.tensor([[0.6, 0.2, 7.0], [7.0, 1.0, 7.0]], dtype=torch.float64)


def test_policy_loss_by_hand():
    # clipped gains: A = 1: min(1.5, 1.2) = 1.2, min(.5, .8) = .5;  A = -2: min(-3, -2.4) = -3
    # k3(1.5) = 1/1.5 - 1 + ln 1.5 = .0721318, k3(.5) = 2 - 1 + ln .5 = .3068528
    # sequence 0: ((-1.2 + .00721318) + (-.5 + .03068528))/2 = -.83105077;  sequence 1: 3 + .00721318 = 3.00721318
    # (1 * -.83105077 + .5 * 3.00721318)/4 = .67255582/4 = .16813896
    out = policy_loss(NEW, OLD, ADVANTAGES, MASK, denominator=4, kl_coef=0.1, weights=WEIGHTS)
    assert out.loss.item() == pytest.approx(0.16813896, abs=1e-7)
    # sums over the three trained tokens: .0721318 + .3068528 + .0721318; all three ratios are outside [.8, 1.2]
    assert out.metrics["approx_kl"].item() == pytest.approx(0.4511164, abs=1e-6)
    assert out.metrics["clip_fraction"].item() == 3
    assert out.metrics["tokens"].item() == 3
    assert "entropy" not in out.metrics


def test_entropy_bonus_by_hand():
    # minus .5 * mean(.6, .2) = .2 for sequence 0, minus .5 * 1 for sequence 1 at weight .5:
    # (.67255582 - .2 - .25)/4 = .05563896
    out = policy_loss(NEW, OLD, ADVANTAGES, MASK, denominator=4, kl_coef=0.1, ent_coef=0.5, entropy=ENTROPY, weights=WEIGHTS)
    assert out.loss.item() == pytest.approx(0.05563896, abs=1e-7)
    assert out.metrics["entropy"].item() == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # gradient of -r A with respect to logp is -r A where the ratio is not clipped, else 0
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 1.0, -1.1, -1.1, 0),
        (1.5, 1.0, -1.2, 0.0, 1),  # already far enough
        (0.5, 1.0, -0.5, -0.5, 1),  # outside the interval, but the wrong way: still pulled back
        (1.5, -1.0, 1.5, 1.5, 1),
        (0.5, -1.0, 0.8, 0.0, 1),
    ],
)
def test_clipping_and_its_gradient(ratio, advantage, loss, gradient, clipped):
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    out = policy_loss(new, old, torch.tensor([advantage]), torch.ones(1, 1), denominator=1, kl_coef=0.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(gradient)
    assert out.metrics["clip_fraction"].item() == clipped


def test_kl_term_and_its_gradient():
    # A = 0 leaves kl_coef * k3; d/dlogp (exp(-d) - 1 + d) = 1 - exp(-d): ratio 2 -> 1/2 - 1 + ln 2 = .1931472, 1 - 1/2 = .5
    old = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    new = (old.detach() + math.log(2.0)).requires_grad_()
    out = policy_loss(new, old, torch.zeros(1), torch.ones(1, 1), denominator=1, kl_coef=3.0)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(3 * 0.1931472, abs=1e-6)
    assert new.grad.item() == pytest.approx(1.5)
    assert old.grad is None


def test_long_and_short_sequences_weigh_the_same():
    # Mean over the tokens of each sequence, then over sequences: gradient per token -A/(tokens * denominator)
    # sequence 0: -1/(4 * 2) = -.125 on 4 tokens; sequence 1: 3/(1 * 2) = 1.5 on 1 token
    new = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    policy_loss(new, torch.zeros(2, 4), torch.tensor([1.0, -3.0]), mask, denominator=2).loss.backward()
    assert new.grad.tolist() == [[-0.125] * 4, [1.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("split", [(1, 1, 1, 1, 1), (2, 3), (4, 1)])
def test_any_micro_batch_split_gives_the_same_gradient_and_metrics(split):
    generator = torch.Generator().manual_seed(5)
    old = -torch.rand(5, 6, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(5, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, generator=generator)
    mask = torch.rand(5, 6, generator=generator) > 0.4
    parameter = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    scale = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)

    def accumulate(sizes):
        parameter.grad = None
        metrics = {"approx_kl": 0.0, "clip_fraction": 0.0, "tokens": 0.0, "entropy": 0.0}
        start = 0
        for size in sizes:
            rows = slice(start, start + size)
            new = old[rows] + noise[rows] + parameter * scale
            out = policy_loss(new, old[rows], advantages[rows], mask[rows], denominator=5, ent_coef=0.1, entropy=new.square())
            out.loss.backward()
            for name, value in out.metrics.items():
                metrics[name] += value.item()
            start += size
        return parameter.grad.clone(), metrics

    whole, whole_metrics = accumulate((5,))
    parts, parts_metrics = accumulate(split)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    assert parts_metrics == pytest.approx(whole_metrics)
    assert whole.abs().min() > 0


def test_empty_masks_and_zero_weights_contribute_nothing():
    # rows 1 (empty mask) and 2 (weight 0) hold garbage; row 0 alone: -A = -1, over denominator 2
    new = torch.tensor([[0.0], [math.inf], [math.nan]], requires_grad=True)
    old = torch.tensor([[0.0], [-math.inf], [0.0]])
    out = policy_loss(
        new,
        old,
        torch.tensor([1.0, 1.0, 1.0]),
        torch.tensor([[1], [0], [1]]),
        denominator=2,
        ent_coef=0.5,
        entropy=torch.tensor([[0.0], [math.nan], [math.nan]]),
        weights=torch.tensor([1.0, 1.0, 0.0]),
    )
    out.loss.backward()
    assert out.loss.item() == -0.5
    assert new.grad.tolist() == [[-0.5], [0.0], [0.0]]
    assert {name: value.item() for name, value in out.metrics.items()} == {
        "approx_kl": 0.0,
        "clip_fraction": 0,
        "tokens": 1,
        "entropy": 0.0,
    }


def test_all_masked_batch_is_a_zero_that_can_be_backpropagated():
    # pitfall 4, and a padding micro-batch must still take part in collective calls
    new = torch.randn(2, 3, requires_grad=True)
    out = policy_loss(new, torch.randn(2, 3), torch.ones(2), torch.zeros(2, 3), denominator=8)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert new.grad.abs().sum().item() == 0.0


def test_metrics_are_detached():
    new = NEW.clone().requires_grad_()
    out = policy_loss(new, OLD, ADVANTAGES, MASK, denominator=4, entropy=ENTROPY.clone().requires_grad_())
    assert not any(value.requires_grad for value in out.metrics.values())
    assert out.loss.requires_grad


def test_value_loss_by_hand():
    # p = sigmoid(0) = .5 and sigmoid(ln 3) = .75; O = +1, -1: nll ln 2 = .6931472 and -ln .25 = 1.3862944
    # (.6931472 + .5 * 1.3862944)/4 = .3465736.  gradient (p - y) w/4: -.125, .75 * .5/4 = .09375. brier .25 + .5625
    logits = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64, requires_grad=True)
    out = value_loss(logits, torch.tensor([1.0, -1.0]), denominator=4, weights=torch.tensor([1.0, 0.5]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.3465736, abs=1e-6)
    assert logits.grad.tolist() == pytest.approx([-0.125, 0.09375])
    assert out.metrics["brier"].item() == pytest.approx(0.8125)
    assert out.metrics["samples"].item() == 2


def test_value_loss_ignores_padding():
    logits = torch.tensor([0.0, math.nan], requires_grad=True)
    out = value_loss(logits, torch.tensor([-1.0, 0.0]), denominator=1, weights=torch.tensor([1.0, 0.0]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.6931472, abs=1e-6)
    assert logits.grad.tolist() == [0.5, 0.0]
    assert out.metrics["brier"].item() == 0.25
    assert out.metrics["samples"].item() == 1


def test_token_logprobs_at_temperature():
    # logits 0, ln 3: p = 1/4, 3/4; at temperature 1/2 the logits double: 0, ln 9: p = 1/10, 9/10
    logits = torch.tensor([0.0, math.log(3.0)]).repeat(1, 2, 1)
    targets = torch.tensor([[0, 1]])
    at_one, _ = token_logprobs(logits, targets, temperature=1.0)
    at_half, _ = token_logprobs(logits, targets, temperature=0.5)
    assert at_one[0].tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)], abs=1e-6)
    assert at_half[0].tolist() == pytest.approx([math.log(1 / 10), math.log(9 / 10)], abs=1e-6)


def test_token_entropy_at_temperature():
    # p = 1/4, 3/4: .25 ln 4 + .75 ln(4/3) = .3465736 + .2157616; p = 1/10, 9/10: .2302585 + .0948245
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    target = torch.zeros(1, 1).long()
    for temperature, expected in ((1.0, 0.5623351), (0.5, 0.3250830)):
        _, entropy = token_logprobs(logits, target, temperature=temperature, with_entropy=True)
        assert entropy.item() == pytest.approx(expected, abs=1e-6)


def test_log_softmax_runs_in_float32_and_entropy_of_a_certain_token_has_a_finite_gradient():
    target = torch.zeros(1, 1).long()
    assert token_logprobs(torch.zeros(1, 1, 4).bfloat16(), target, temperature=1.0)[0].dtype == torch.float32
    logits = torch.tensor([[[0.0, 500.0]]], requires_grad=True)  # the first probability underflows to 0
    _, entropy = token_logprobs(logits, target, temperature=1.0, with_entropy=True)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0.0, abs=1e-4)
    assert torch.isfinite(logits.grad).all()


def test_bad_input_is_named():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="denominator must be positive, got 0"):
        policy_loss(ones, ones, torch.ones(2), ones, denominator=0)
    with pytest.raises(ValueError, match=r"advantages must have shape \(2,\), got \(2, 3\)"):
        policy_loss(ones, ones, ones, ones, denominator=1)
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 3\), got \(2,\)"):
        policy_loss(ones, ones, torch.ones(2), torch.ones(2), denominator=1)
    with pytest.raises(ValueError, match=r"ent_coef is 0.1 but no entropy"):
        policy_loss(ones, ones, torch.ones(2), ones, denominator=1, ent_coef=0.1)
    with pytest.raises(ValueError, match=r"an outcome is \+1 or -1, got 0.0"):
        value_loss(torch.zeros(2), torch.tensor([1.0, 0.0]), denominator=1)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1).long(), temperature=0.0)
