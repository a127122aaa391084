from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rla_lightning.models.tokenizer import environment_tokenizer
from rla_lightning.types import ConfigError


def test_ids_depend_on_the_set_of_words_only() -> None:
    tokenizer = environment_tokenizer(["cup", "apple", "cup", "+1"])
    assert tokenizer.get_vocab() == {
        **{"<pad>": 0, "</s>": 1, "<unk>": 2, "<act>": 3, "<judge>": 4, "<value>": 5},
        **{"+1": 6, "-1": 7, "apple": 8, "cup": 9},
    }
    assert tokenizer("cup  apple\n-1 pear <act>").input_ids == [9, 8, 7, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_decoding_joins_words_with_single_spaces() -> None:
    tokenizer = environment_tokenizer(["#find", "go-shelf_a", "open"])
    ids = tokenizer("#find go-shelf_a +1").input_ids
    assert tokenizer.decode([*ids, 1, 0], skip_special_tokens=True) == "#find go-shelf_a +1"


def test_round_trip_through_files(tmp_path: Path) -> None:
    tokenizer = environment_tokenizer(["cup", "apple"])
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded("cup +1 <judge>").input_ids == [9, 6, 4]
    assert loaded.decode([9, 6, 4, 1], skip_special_tokens=True) == "cup +1"


def test_empty_vocabulary_and_malformed_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no vocabulary.*give a model path"):
        environment_tokenizer([])
    with pytest.raises(ConfigError, match="'two words'"):
        environment_tokenizer(["two words"])
