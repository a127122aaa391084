"""Conversations that are only appended to: every prompt starts with the last prompt and the policy's own tokens."""

from itertools import pairwise
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.rollout.collect import collect, judge
from rla_lightning.rollout.explorer import Explorer
from rla_lightning.rollout.formats import Turn, latest, turns_of
from rla_lightning.rollout.formats_chat import ChatCriticFormat, ChatJudgeFormat, ChatPolicyFormat
from rla_lightning.rollout.sampler import Sampler
from rla_lightning.rollout.templates import encode_next_turn
from rla_lightning.types import (
    Completion,
    ConfigError,
    ExpertAction,
    Observation,
    RolloutGroup,
    SamplingParams,
    Step,
    StepLabel,
    Task,
    Trajectory,
    Transition,
)

START, END, OTHER_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THOUGHTS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
OPENS_THOUGHT = PLAIN.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
SYSTEM_LAST = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "[INST]{% if loop.last and system %}{{ system }} {% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system role first') }}{% endif %}" + PLAIN
ONE_MESSAGE = "{% if messages | length > 2 %}{{ raise_exception('one message') }}{% endif %}" + PLAIN
ONLY_USERS = "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
REPEATS = PLAIN.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}")

ROOM = Observation("You are in a room. Your task is to: leave.", ("open door", "look"))
HALL = Observation("The door is open.", ("go hall", "look"))
FREE = Observation("What is 2 + 3?")


def byte_tokenizer(template: str | None = PLAIN, pad_token: str = OTHER_END) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and one word that is a token: any text survives a round trip."""
    symbols = [START, END, OTHER_END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(symbols)}, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=pad_token, additional_special_tokens=[START, OTHER_END]
    )
    fast.chat_template = template
    return fast


def word_tokenizer(template: str) -> PreTrainedTokenizerFast:
    words = ["<unk>", START, END, OTHER_END, "user", "assistant", "system", "go", "on", "<think>"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, additional_special_tokens=[START, OTHER_END]
    )
    fast.chat_template = template
    return fast


@pytest.mark.parametrize(
    ("template", "answer", "follows"),
    [
        (PLAIN, (7, 2), (1, 4, 7, 8, 2, 1, 5)),  # the sampled end token closes the answer
        (PLAIN, (7, 8), (2, 1, 4, 7, 8, 2, 1, 5)),  # a truncated answer is closed
        (PLAIN, (7, 3), (2, 1, 4, 7, 8, 2, 1, 5)),  # the template has another end token than was sampled
        (PLAIN, (2, 7), (2, 1, 4, 7, 8, 2, 1, 5)),  # an end token is the last
        (PLAIN, (), (2, 1, 4, 7, 8, 2, 1, 5)),
        (FORGETS_THOUGHTS, (9, 7, 2), (1, 4, 7, 8, 2, 1, 5)),
        (OPENS_THOUGHT, (7, 2), (1, 4, 7, 8, 2, 1, 5, 9)),
        (NEEDS_SYSTEM, (7, 2), (1, 4, 7, 8, 2, 1, 5)),
    ],
)
def test_what_follows_an_answer(template, answer, follows):
    assert encode_next_turn(word_tokenizer(template), answer, " go on\n") == follows


def test_a_newline_after_the_end_token_is_kept():
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    assert tokenizer.decode(encode_next_turn(tokenizer, (60, end), "Hm.")) == (f"\n{START}user\nHm.{END}\n{START}assistant\n")
    newline = tokenizer("\n").input_ids[0]  # part of what closes an answer, yet no end
    assert tokenizer.decode(encode_next_turn(tokenizer, (60, newline), "Hm.")).startswith(f"{END}\n{START}user")


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (None, None, "has no chat template"),
        (ONE_MESSAGE, None, "refuses a conversation: one message"),
        (NO_SYSTEM, "Be brief.", "refuses the system message 'Be brief.': no system role"),
        (SYSTEM_LAST, "Be brief.", "does not append new messages"),
        (ONLY_USERS, None, "does not append new messages"),
        (REPEATS, None, "does not append new messages"),
    ],
)
def test_templates_that_cannot_be_continued_are_refused_at_the_first_prompt(template, system, message):
    with pytest.raises(ConfigError, match=message):
        ChatPolicyFormat(system).prompt(byte_tokenizer(template), [], ROOM)


def test_templates_that_can_be_continued():
    for template in (NO_SYSTEM, SYSTEM_LAST, NEEDS_SYSTEM, OPENS_THOUGHT):
        assert ChatPolicyFormat().prompt(byte_tokenizer(template), [], ROOM)
    shown = byte_tokenizer().decode(ChatPolicyFormat("Be brief.").prompt(byte_tokenizer(), [], ROOM))
    assert shown.startswith(f"{START}system\nBe brief.{END}\n{START}user\nYou are solving")
    shown = byte_tokenizer(NEEDS_SYSTEM).decode(ChatPolicyFormat().prompt(byte_tokenizer(NEEDS_SYSTEM), [], ROOM))
    assert shown.startswith(f"{START}system\nYou are a careful assistant.{END}\n{START}user\nYou are solving")


FIRST = (
    f"{START}user\nYou are solving a task step by step by acting in an environment.\n\n"
    "You are in a room. Your task is to: leave.\n\nCommands you can choose from:\n1. open door\n2. look\n\n"
    f"Think about what to do next, then give the number of your command in \\boxed{{}}.{END}\n{START}assistant\n"
)
SECOND = (
    f"\n{START}user\nThe door is open.\n\nCommands you can choose from:\n1. go hall\n2. look\n\n"
    f"Think about what to do next, then give the number of your command in \\boxed{{}}.{END}\n{START}assistant\n"
)


@pytest.mark.parametrize("template", [PLAIN, FORGETS_THOUGHTS])
def test_two_turns_word_for_word(template):
    tokenizer, policy = byte_tokenizer(template, pad_token=END), ChatPolicyFormat()
    first = policy.prompt(tokenizer, [], ROOM)
    assert tokenizer.decode(first) == FIRST
    said = tuple(tokenizer.convert_tokens_to_ids(list("<think>the")))  # as text it would be "th" once and "the" once
    said += (*tokenizer("</think>\\boxed{1}").input_ids, tokenizer.eos_token_id)
    assert len(tokenizer(tokenizer.decode(said)).input_ids) == len(said) - 3
    second = policy.prompt(tokenizer, [Turn(1, ROOM, "open door", first, said)], HALL)
    assert second[: len(first) + len(said)] == first + said
    assert tokenizer.decode(second) == FIRST + "<think>the</think>\\boxed{1}" + END + SECOND


def test_commands_listed_by_their_words_and_free_actions():
    tokenizer, policy = byte_tokenizer(), ChatPolicyFormat(numbered=False)
    shown = tokenizer.decode(policy.prompt(tokenizer, [], ROOM))
    assert "choose from:\n- open door\n- look\n\nThink about what to do next, then give your command in \\boxed{}." in shown
    ids = policy.answer(tokenizer, ROOM, ExpertAction("open door", "#leave"))
    assert tokenizer.decode(ids) == f"leave\n\\boxed{{open door}}{END}"
    assert policy.parse("leave\n\\boxed{open door}", ROOM) == "open door"
    assert policy.parse("\\boxed{2}", ROOM) == "look"
    assert policy.parse("\\boxed{fly}", ROOM) is None
    ids = ChatPolicyFormat().answer(tokenizer, ROOM, ExpertAction("look"))
    assert tokenizer.decode(ids) == f"\\boxed{{2}}{END}"
    shown = tokenizer.decode(policy.prompt(tokenizer, [], FREE))
    assert "What is 2 + 3?\n\nThink about what to do next, then give your action in \\boxed{}." in shown
    assert policy.parse("\\boxed{5}", FREE) == "5"
    with pytest.raises(ConfigError, match="'fly' is not an admissible command"):
        policy.answer(tokenizer, ROOM, ExpertAction("fly"))


class Rooms(Environment):
    """Three looks are wanted."""

    name = "rooms"

    def sample(self, rng, difficulty, split="in_domain"):
        return Task("t", "rooms", {}, 0.5, "t")

    def start(self, task):
        return Looks()

    def expert(self, episode, rng):
        return ExpertAction("look", "#why")


class Looks(Episode):
    max_turns = 6

    def __init__(self):
        self.turn, self.observation = 0, ROOM

    def step(self, action):
        self.turn += 1
        self.observation = Observation(f"You have looked {self.turn} times.", ("open door", "look"))
        done = self.turn == 4
        return Transition(self.observation, done, 1.0 if done else None, action == "look")


ANSWERS = [
    ("<think>hm</think>\\boxed{2}", END),
    ("<think>so, so, so", ""),  # truncated
    ("\\boxed{2}", OTHER_END),
    (" \\boxed{2}\n", END),
]


class Says(Sampler):
    """Answers of the four turns, the same for every rollout."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def sample(self, prompts, n, params, keys):
        return [[self.complete(*ANSWERS[int(key.rsplit("/", 1)[-1])])] * n for key in keys]

    def complete(self, text, end):
        ids = tuple(self.tokenizer(text + end).input_ids)
        return Completion(ids, (0.0,) * len(ids), text, "EOS" if end else "TRUNCATED")


@pytest.mark.parametrize("template", [PLAIN, FORGETS_THOUGHTS, OPENS_THOUGHT, SYSTEM_LAST])
@pytest.mark.parametrize("pad_token", [OTHER_END, END])
def test_a_rollout_is_one_sequence(template, pad_token):
    tokenizer = byte_tokenizer(template, pad_token)
    (group,) = collect(
        [Task("t", "rooms", {}, 0.5, "t")],
        2,
        environment=Rooms(),
        sampler=Says(tokenizer),
        tokenizer=tokenizer,
        policy_format=ChatPolicyFormat(),
        critic_format=ChatCriticFormat(),
        params=SamplingParams(max_new_tokens=40),
        key="k",
    )
    assert (group.rollouts, group.successes) == (2, 2)
    steps = group.trajectories[1].steps
    assert [(s.action, s.is_valid) for s in steps] == [("look", True), ("", False), ("look", True), ("look", True)]
    for earlier, later in pairwise(steps):
        kept = earlier.prompt_ids + earlier.completion.token_ids
        assert later.prompt_ids[: len(kept)] == kept
    whole = tokenizer.decode(steps[-1].prompt_ids + steps[-1].completion.token_ids)
    if template == SYSTEM_LAST:
        assert f"<think>so, so, so{END}[INST]You have looked 2 times." in whole
        assert f"\\boxed{{2}}{OTHER_END}{END}[INST]You have looked 3 times." in whole
    else:
        assert f"<think>hm</think>\\boxed{{2}}{END}\n{START}user\nYou have looked 1 times." in whole
        assert f"<think>so, so, so{END}\n{START}user\nYou have looked 2 times." in whole
        assert f"\\boxed{{2}}{OTHER_END}{END}\n{START}user\nYou have looked 3 times." in whole
    assert whole.count("You are solving") == 1
    assert whole.endswith(f" \\boxed{{2}}\n{END}")


def test_a_scripted_agent_can_be_shown_as_a_conversation():
    tokenizer, policy = byte_tokenizer(), ChatPolicyFormat()
    explorer = Explorer(Rooms(), policy, tokenizer, detour_rate=0.0, invalid_rate=0.0)
    visits = list(explorer.episode(Task("t", "rooms", {}, 0.5, "t"), rng=Random(0)))
    assert [(turn.number, turn.prompt_ids) for turn in visits[3].history] == [(1, ()), (2, ()), (3, ())]
    shown = tokenizer.decode(policy.prompt(tokenizer, visits[2].history, visits[2].observation))
    first, _, rest = shown.partition(f"why\n\\boxed{{2}}{END}\n{START}user\nYou have looked 1 times.")
    assert first == FIRST
    assert f"why\n\\boxed{{2}}{END}\n{START}user\nYou have looked 2 times." in rest
    explorer = Explorer(Rooms(), policy, tokenizer, detour_rate=0.0, invalid_rate=1.0)
    broken = list(explorer.episode(Task("t", "rooms", {}, 0.5, "t"), rng=Random(0)))
    assert (broken[-1].action, broken[-1].raw_text in ("", "why")) == ("", True)
    assert tokenizer.decode(broken[-1].history[0].completion_ids) == broken[0].raw_text


def turn(number: int, text: str, action: str) -> Turn:
    return Turn(number, Observation(text), action)


HISTORY = [turn(1, "one", "a"), turn(2, "two", ""), turn(3, "three", "c"), turn(4, "four", "d"), turn(5, "five", "e")]


def test_the_judge_reads_one_message():
    tokenizer, format_ = byte_tokenizer(), ChatJudgeFormat("You are strict.", max_history=2)
    prompt = format_.prompt(tokenizer, HISTORY, ROOM, "look", "\\boxed{2}", True, "Hm.")
    shown = tokenizer.decode(prompt)
    assert shown.startswith(f"{START}system\nYou are strict.{END}\n{START}user\nYou review one step")
    assert "[1] Did: a\n(turns 2 to 3 are left out)\n[4] Observed: four\n[4] Did: d\n[5] Observed: five" in shown
    assert shown.endswith(f"harmful.{END}\n{START}assistant\n")
    assert shown.count(START) == 3
    assert format_.parse("so \\boxed{-1}") == -1
    assert tokenizer.decode(format_.answer(tokenizer, StepLabel(1, "#ok"))) == f"ok\n\\boxed{{1}}{END}"
    with pytest.raises(ConfigError, match="max_history must be at least 1 or null, got 0"):
        ChatJudgeFormat(max_history=0)


def test_the_critic_reads_the_conversation():
    tokenizer = byte_tokenizer(FORGETS_THOUGHTS)
    prompt = ChatCriticFormat(max_history=3).prompt(tokenizer, "leave", HISTORY, HALL)
    assert tokenizer.decode(prompt) == (
        f"{START}user\nTask: leave\n\none{END}\n{START}assistant\na{END}\n"
        f"{START}user\n(turn 2 is left out)\nthree{END}\n{START}assistant\nc{END}\n"
        f"{START}user\nfour{END}\n{START}assistant\nd{END}\n"
        f"{START}user\nfive{END}\n{START}assistant\ne{END}\n"
        f"{START}user\nThe door is open.{END}\n{START}assistant\n"
    )
    shown = tokenizer.decode(ChatCriticFormat().prompt(tokenizer, "", HISTORY[:2], HALL))
    assert shown.startswith(f"{START}user\none{END}\n")
    assert f"{START}assistant\n(no valid command){END}\n" in shown
    shown = tokenizer.decode(ChatCriticFormat().prompt(tokenizer, "leave", [], HALL))
    assert shown == f"{START}user\nTask: leave\n\nThe door is open.{END}\n{START}assistant\n"


def test_votes_of_a_step_share_one_prompt():
    tokenizer = byte_tokenizer()
    steps = [Step((9,), Completion((8,), (0.0,), "\\boxed{2}", "EOS"), ROOM, "look", True, "Hm.")]
    assert turns_of(steps) == [Turn(1, ROOM, "look", (9,), (8,))]
    assert latest(HISTORY, 1) == (HISTORY[0], HISTORY[4])
    assert latest(HISTORY, 4) == latest(HISTORY, None) == HISTORY
    task = Task("t", "rooms", {}, 0.5, "t")
    (judged,) = judge(
        [RolloutGroup(task, (Trajectory(task, tuple(steps), -1.0, "TRUNCATED"),))],
        3,
        sampler=Says(tokenizer),
        tokenizer=tokenizer,
        judge_format=ChatJudgeFormat(),
        params=SamplingParams(max_new_tokens=4),
        key="j",
    )
    assert len({vote.prompt_ids for vote in judged.judgments[0][0]}) == 1
    assert len(judged.judgments[0][0]) == 3
