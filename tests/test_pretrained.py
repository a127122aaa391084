"""The loop with models from disk that read text: paths, the paper's formats, LoRA."""

import csv
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

FORMATS = "rla_lightning.rollout.formats_paper.Paper"
HOUSEHOLD = "rla_lightning.environments.household.HouseholdEnvironment"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads and writes bytes, as `save_pretrained` leaves it."""
    place = tmp_path_factory.mktemp("model")
    alphabet = {token: index for index, token in enumerate(["<end>", *sorted(ByteLevel.alphabet())])}
    raw = Tokenizer(BPE(alphabet, merges=[]))
    raw.pre_tokenizer, raw.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(place)  # no pad token
    config = AutoConfig.for_model(
        "llama", vocab_size=len(alphabet), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def test_text_models_run_the_loop(rla, folder: Path, tmp_path: Path) -> None:
    """They only babble: every answer is invalid and every vote unparsable, which is what the reward model learns from."""
    models = [arg for name in ("policy", "reward_model", "critic") for arg in (f"--model.{name}.path", folder)]
    formats = [
        arg for name in ("policy", "judge", "critic") for arg in (f"--model.{name}_format", f"{FORMATS}{name.title()}Format")
    ]
    sizes = {"tasks_per_iteration": 2, "pool_size": 4, "validation_tasks": 1, "test_tasks": 1}
    outcome = rla(
        *("fit", "--experiment", "text", "--runs", tmp_path, "--trainer.accelerator", "cpu", "--trainer.max_epochs", 1),
        *("--data.environment", HOUSEHOLD, *models, *formats, "--model.reward_model.lora.rank", 2),
        *(arg for name, size in sizes.items() for arg in (f"--data.{name}", size)),
        *("--model.rollout.group_size", 2, "--model.rollout.max_turns", 2, "--model.rollout.eval_max_turns", 1),
        *("--model.reward_model_update.success_low", 0),  # they win nothing
    )
    assert outcome.code == 0, outcome.err
    with (tmp_path / "text" / "version_0" / "metrics.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row.get("rollout/success_rate")]
    assert float(row["rollout/invalid_action_rate"]) == 1.0
    assert float(row["reward_model/parse_error_rate"]) == 1.0
    assert float(row["reward_model/samples"]) == 2 * 2 * 2 * 3  # tasks, rollouts, turns, votes
    assert float(row["reward_model/optimizer_steps"]) == 4
    assert float(row["critic/optimizer_steps"]) == 4
