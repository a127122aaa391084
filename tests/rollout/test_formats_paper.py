import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rla_lightning.rollout.formats import Turn
from rla_lightning.rollout.formats_paper import PaperCriticFormat, PaperJudgeFormat, PaperPolicyFormat, last_boxed
from rla_lightning.types import ConfigError, ExpertAction, Observation, StepLabel

SEEN = Observation("You see a mug.", ("look around", "take mug", "go to desk 1"))
FREE = Observation("What is 2 + 3?")
HISTORY = [
    Turn(1, Observation("You are in a hall.", ("open door", "sit")), "open door"),
    Turn(2, Observation("The door is locked.", ("open door", "knock")), ""),
]
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system role first') }}{% endif %}" + CHAT


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes as tokens: any text survives a round trip."""
    symbols = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("template", [None, CHAT, NO_SYSTEM, NEEDS_SYSTEM])
def test_policy_prompt_for_any_template(template):
    tokenizer = byte_tokenizer(template)
    text = tokenizer.decode(PaperPolicyFormat().prompt(tokenizer, HISTORY, SEEN))
    for part in (
        "[1] Observed: You are in a hall.\n[1] Did: open door",
        "[2] Observed: The door is locked.\n[2] Did: (no valid command)",
        "What you observe now:\nYou see a mug.",
        "1. look around\n2. take mug\n3. go to desk 1",
        "\\boxed{}",
    ):
        assert part in text
    assert text.startswith("<|system|>") == (template == NEEDS_SYSTEM)
    assert text.endswith("Answer:\n" if template is None else "<|assistant|>")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("I take it: \\boxed{2}", "take mug"),
        ("\\boxed{1} no, \\boxed{ 3 }", "go to desk 1"),
        ("\\boxed{take mug}", "take mug"),
        ("\\boxed{\\text{take mug}}", "take mug"),
        ("\\boxed{0}", None),
        ("\\boxed{4}", None),
        ("\\boxed{-1}", None),
        ("\\boxed{}", None),
        ("\\boxed{2} then \\boxed{fly}", None),
        ("\\boxed{2", None),
        ("2", None),
        ("<think>\\boxed{2}</think> hm", None),
        ("<think>\\boxed{2}</think> \\boxed{1}", "look around"),
    ],
)
def test_policy_parse(text, command):
    assert PaperPolicyFormat().parse(text, SEEN) == command


def test_policy_free_text_and_answer():
    policy, tokenizer = PaperPolicyFormat(), byte_tokenizer()
    assert policy.parse("so \\boxed{5}", FREE) == "5"
    assert policy.parse("5", FREE) is None
    assert "1." not in tokenizer.decode(policy.prompt(tokenizer, [], FREE))
    ids = policy.answer(tokenizer, SEEN, ExpertAction("take mug", "#fetch"))
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "fetch\n\\boxed{2}"
    assert tokenizer.decode(policy.answer(tokenizer, FREE, ExpertAction("5"))[:-1]) == "\\boxed{5}"
    with pytest.raises(ConfigError, match="'fly'"):
        policy.answer(tokenizer, SEEN, ExpertAction("fly"))


def test_judge():
    judge, tokenizer = PaperJudgeFormat(), byte_tokenizer(CHAT)
    prompt = judge.prompt(tokenizer, HISTORY, SEEN, "take mug", "Mug! \\boxed{2}", True, "You hold a mug.")
    text = tokenizer.decode(prompt)
    for part in ("You are in a hall.", "[2] Did:", "Mug! \\boxed{2}", "gave: take mug\n", "You hold a mug.", "\\boxed{-1}"):
        assert part in text
    text = tokenizer.decode(judge.prompt(tokenizer, [], SEEN, "", "eh", False, ""))
    assert "gave: (no valid command) (the environment did not accept it)" in text
    assert [judge.parse(text) for text in ("a \\boxed{1}", "\\boxed{1} \\boxed{-1}", "\\boxed{0}", "1", "\\boxed{+1}")] == [
        1, -1, None, None, 1,
    ]  # fmt: skip
    for score in (1, -1):
        answer = tokenizer.decode(judge.answer(tokenizer, StepLabel(score, "why")), skip_special_tokens=True)
        assert judge.parse(answer) == score


LONG = [Turn(n, Observation(f"Room {n}.", ("go on", f"leave room {n}")), "go on") for n in range(1, 41)]


def test_a_long_history_names_no_earlier_commands():
    tokenizer = byte_tokenizer()
    text = tokenizer.decode(PaperPolicyFormat().prompt(tokenizer, LONG, SEEN))
    assert text.startswith(
        "You are solving a task step by step by acting in an environment.\n\nWhat happened so far:\n"
        "[1] Observed: Room 1.\n[1] Did: go on\n[2] Observed: Room 2.\n[2] Did: go on\n"
    )
    assert "[40] Observed: Room 40.\n[40] Did: go on\n\nWhat you observe now:\nYou see a mug.\n\n" in text
    assert "leave room" not in text
    text = tokenizer.decode(PaperJudgeFormat().prompt(tokenizer, LONG, SEEN, "take mug", "\\boxed{2}", True, "Taken."))
    assert "leave room" not in text
    assert text.count("Room 1.") == 1
    assert "leave room" not in tokenizer.decode(PaperCriticFormat().prompt(tokenizer, "go", LONG, SEEN))


def test_max_history():
    tokenizer = byte_tokenizer()
    log = "[1] Observed: Room 1.\n[1] Did: go on\n(turns 2 to 38 are left out)\n[39] Observed: Room 39.\n[39] Did: go on\n[40]"
    texts = [
        PaperPolicyFormat(max_history=2).prompt(tokenizer, LONG, SEEN),
        PaperJudgeFormat(max_history=2).prompt(tokenizer, LONG, SEEN, "take mug", "\\boxed{2}", True, "Taken."),
        PaperCriticFormat(max_history=2).prompt(tokenizer, "go", LONG, SEEN),
    ]
    for ids in texts:
        assert log in tokenizer.decode(ids)
    text = tokenizer.decode(PaperPolicyFormat(max_history=2).prompt(tokenizer, LONG[:4], SEEN))
    assert "[1] Did: go on\n(turn 2 is left out)\n[3] Observed: Room 3." in text
    assert "left out" not in tokenizer.decode(PaperPolicyFormat(max_history=2).prompt(tokenizer, LONG[:3], SEEN))
    for format_ in (PaperPolicyFormat, PaperJudgeFormat, PaperCriticFormat):
        with pytest.raises(ConfigError, match="max_history must be at least 1 or null, got 0"):
            format_(max_history=0)


def test_critic_and_end_tokens():
    tokenizer = byte_tokenizer()
    text = tokenizer.decode(PaperCriticFormat().prompt(tokenizer, "fetch a mug", HISTORY, SEEN))
    assert "Task: fetch a mug" in text
    assert "open door" in text
    assert "You see a mug." in text
    assert last_boxed("none") is None
