import torch

from rla_lightning.models.language_model import load_language_model
from rla_lightning.models.muon import muon_and_adamw
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.models.value_model import load_value_model

TINY = TinySpec(width=16, layers=2, heads=2, mlp_width=32)


def count(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def test_matrices_of_blocks_go_to_muon_and_the_rest_to_adamw() -> None:
    muon, adamw = muon_and_adamw(load_language_model(LanguageModelSpec(tiny=TINY), ["w"], "a").model)
    assert isinstance(muon, torch.optim.Muon)
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
