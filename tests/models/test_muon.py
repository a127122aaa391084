import torch

from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.muon import Muon, muon_and_adamw, orthogonal
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.models.value_model import load_value_model

TINY = TinySpec(width=16, layers=2, heads=2, mlp_width=32)


def count(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def test_matrices_of_blocks_go_to_muon_and_the_rest_to_adamw() -> None:
    muon, adamw = muon_and_adamw(load_language_model(LanguageModelSpec(tiny=TINY), ["w"], "a").model)
    assert isinstance(muon, Muon)
    assert count(muon) == 2 * (4 * 16 * 16 + 3 * 16 * 32)  # q, k, v, o and gate, up, down
    assert count(adamw) == 9 * 16 + 2 * (3 * 16 + 2 * 16) + 16  # embedding, biases and norms of 2 layers, last norm
    muon, adamw = muon_and_adamw(load_value_model(ValueModelSpec(tiny=TINY), ["w"], "a").model)
    assert count(adamw) == 9 * 16 + 2 * (3 * 16 + 2 * 16) + 16 + 33  # and the head


def test_adapters_need_one_optimizer() -> None:
    model = load_language_model(LanguageModelSpec(tiny=TINY, lora=LoraSpec(rank=2)), ["w"], "a").model
    assert [type(optimizer).__name__ for optimizer in muon_and_adamw(model)] == ["Muon"]


def test_learns_to_repeat_the_first_word() -> None:
    words = [f"w{index}" for index in range(20)]
    model = load_language_model(LanguageModelSpec(tiny=TINY), words, "a").model
    optimizers = muon_and_adamw(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        ids = torch.randint(8, 28, (32, 6), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, -1], ids[:, 0])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss.item() < 0.5  # chance: log 20 = 3


def test_the_same_steps_as_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 24), (24, 8), (8, 24), (8, 8)]
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizers = Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=0.01, rtol=0.02)  # theirs is computed in bfloat16


def test_singular_values_become_about_one() -> None:
    matrices = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0))
    matrices[1] *= 1e-3
    for directions in (orthogonal(matrices, 5), orthogonal(matrices.mT, 5).mT):
        values = torch.linalg.svdvals(directions)
        assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.allclose(orthogonal(matrices, 12), left @ right, atol=0.35)  # the same directions
