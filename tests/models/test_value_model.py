import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rla_lightning.models.language_model import load_trainable_state, trainable_state
from rla_lightning.models.specs import LoraSpec, TinySpec, ValueModelSpec
from rla_lightning.models.value_model import load_value_model

WORDS = [f"w{index:02d}" for index in range(60)]
TINY = TinySpec(width=16, layers=2, heads=2, mlp_width=32)


def test_untrained_prediction_is_one_half() -> None:
    loaded = load_value_model(ValueModelSpec(tiny=TINY), WORDS, "a")
    ids = torch.randint(8, 60, (3, 7))
    assert loaded.model.success_probability(ids, torch.ones_like(ids)).tolist() == [0.5, 0.5, 0.5]


def test_padding_on_either_side_changes_nothing() -> None:
    model = load_value_model(ValueModelSpec(tiny=TINY), WORDS, "a").model
    torch.nn.init.normal_(model.head.weight)
    plain = torch.tensor([[8, 9, 10]])
    ids = torch.tensor([[8, 9, 10, 0, 0], [0, 0, 8, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    expected = model(plain, torch.ones_like(plain))
    torch.testing.assert_close(model(ids, mask), expected.repeat(2), atol=1e-5, rtol=0)
    assert model(ids, mask).dtype == torch.float32


def test_lora_trains_adapters_and_head() -> None:
    model = load_value_model(ValueModelSpec(tiny=TINY, lora=LoraSpec(rank=2, target_modules=["q_proj"])), WORDS, "a").model
    state = trainable_state(model)
    assert len(state) == 6  # 2 layers x (A, B), head weight and bias
    assert {"head.weight", "head.bias"} < set(state)
    load_trainable_state(model, state)


def test_beats_the_best_constant_on_prompts_of_45_tokens() -> None:
    """3,000 prompts; success depends on two words somewhere in the prompt and is flipped in 10%."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 66, (4000, 45), generator=generator)
    rows = torch.arange(4000)
    flags = torch.randint(0, 2, (4000, 2), generator=generator)  # is each of the two words there?
    places = torch.rand(4000, 45, generator=generator).argsort(-1)
    for word in (0, 1):
        ids[rows, places[:, word]] = torch.where(flags[:, word] == 1, 8 + word, ids[rows, places[:, word]])
    chance = 0.1 + 0.8 * (flags.sum(-1) == 2).float()
    won = (torch.rand(4000, generator=generator) < chance).float()
    mask = torch.ones_like(ids)
    model = load_value_model(ValueModelSpec(), WORDS, "a").model
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for _ in range(2):
        for batch in torch.randperm(3000, generator=generator).split(50):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(ids[batch], mask[batch]), won[batch]).backward()
            optimizer.step()
    test = slice(3000, 4000)
    brier = (model.success_probability(ids[test], mask[test]) - won[test]).square().mean().item()
    base = won[test].mean().item()
    assert brier < 0.75 * base * (1 - base)
