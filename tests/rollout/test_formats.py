import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rla_lightning.rollout.formats import (
    CompactCriticFormat,
    CompactJudgeFormat,
    CompactPolicyFormat,
    Turn,
    encode_words,
    short_forms,
)
from rla_lightning.types import ConfigError, ExpertAction, Observation, StepLabel

COMMANDS = ("go to cabinet 1", "go to cabinet 2", "take apple 1 from desk", "put apple 1 in/on desk", "look")
SEEN = Observation("at desk : far", COMMANDS, ("at", "desk"))
FREE = Observation("reach desk")


def words(tokenizer, ids):
    return tokenizer.convert_ids_to_tokens(list(ids))


def test_short_forms():
    assert short_forms(COMMANDS) == {
        "go to cabinet 1": "go cabinet_1",
        "go to cabinet 2": "go cabinet_2",
        "take apple 1 from desk": "take apple_1",
        "put apple 1 in/on desk": "put apple_1",
        "look": "look",
    }


def test_short_forms_that_clash_are_longer():
    commands = ("take mug 1 from desk 1", "take mug 1 from shelf 2", "take mug 2 from desk 1", "put a in b", "put a on b")
    assert short_forms(commands) == {
        "take mug 1 from desk 1": "take mug_1 desk_1",
        "take mug 1 from shelf 2": "take mug_1 shelf_2",
        "take mug 2 from desk 1": "take mug_2",
        "put a in b": "put a in b",
        "put a on b": "put a on b",
    }
    for command, form in short_forms(commands).items():
        assert CompactPolicyFormat().parse(form, Observation("", commands)) == command
    assert CompactPolicyFormat().parse("take mug_1", Observation("", commands)) is None


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("#look go cabinet_2", "go to cabinet 2"),
        ("go cabinet_2 #look", "go to cabinet 2"),
        ("take apple_1", "take apple 1 from desk"),
        ("#look", None),
        ("", None),
        ("go", None),
        ("go cabinet_2 cabinet_2", None),
        ("cabinet_2 go", None),
        ("take mug_1", None),
    ],
)
def test_compact_policy_parse(text, command):
    assert CompactPolicyFormat().parse(text, SEEN) == command


def test_compact_policy(tokenizer):
    policy = CompactPolicyFormat()
    assert words(tokenizer, policy.prompt(tokenizer, [], SEEN)) == ["<act>", "at", "desk"]
    assert words(tokenizer, policy.prompt(tokenizer, [Turn(1, SEEN, "look")], FREE)) == ["<act>", "reach", "desk"]
    expert = ExpertAction("take apple 1 from desk", "#good")
    assert words(tokenizer, policy.answer(tokenizer, SEEN, expert)) == ["#good", "take", "apple_1", "</s>"]
    text = tokenizer.decode(policy.answer(tokenizer, SEEN, expert), skip_special_tokens=True)
    assert policy.parse(text, SEEN) == expert.action
    assert words(tokenizer, policy.answer(tokenizer, FREE, ExpertAction("go left"))) == ["go", "left", "</s>"]
    assert policy.parse("#good go left", FREE) == "go left"
    assert policy.parse("#good", FREE) is None
    with pytest.raises(ConfigError, match="'fly'"):
        policy.answer(tokenizer, SEEN, ExpertAction("fly"))


def test_compact_judge(tokenizer):
    judge = CompactJudgeFormat()
    prompt = judge.prompt(tokenizer, [], SEEN, "go to cabinet 1", "#look go cabinet_1", True, "far")
    assert words(tokenizer, prompt) == ["<judge>", "at", "desk", "<act>", "go", "cabinet_1"]
    prompt = judge.prompt(tokenizer, [], SEEN, "", "go go far far far far", False, "")
    assert words(tokenizer, prompt) == ["<judge>", "at", "desk", "<act>", "go", "go", "far", "far", "<unk>"]
    prompt = judge.prompt(tokenizer, [], FREE, "go left", "#look go left", True, "")
    assert words(tokenizer, prompt) == ["<judge>", "reach", "desk", "<act>", "go", "left"]
    assert words(tokenizer, judge.answer(tokenizer, StepLabel(1, "#good"))) == ["#good", "+1", "</s>"]
    assert words(tokenizer, judge.answer(tokenizer, StepLabel(-1))) == ["-1", "</s>"]
    assert [judge.parse(text) for text in ("#bad -1", "+1", "", "#bad", "+1 -1", "+1 +1", "+1 #bad", "1", "#good +1")] == [
        -1, 1, None, None, None, None, None, None, 1,
    ]  # fmt: skip


def test_compact_critic(tokenizer):
    prompt = CompactCriticFormat().prompt(tokenizer, "reach mug_1", [], SEEN)
    assert words(tokenizer, prompt) == ["<value>", "reach", "mug_1", "at", "desk"]


def test_encode_words(tokenizer):
    assert encode_words(tokenizer, ["<act>", "desk", "nonsense"])[2] == tokenizer.unk_token_id
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")), unk_token="<unk>")
    with pytest.raises(ConfigError, match="<judge>"):
        encode_words(plain, ["<judge>", "desk"])
    with pytest.raises(ConfigError, match="end token"):
        CompactJudgeFormat().answer(plain, StepLabel(1))
    with pytest.raises(ConfigError, match="unknown token"):
        encode_words(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))), ["a"])
