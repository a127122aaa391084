import logging
import multiprocessing
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rla_lightning.curriculum.adapters import ParametricAdapter, TaskAdapter
from rla_lightning.curriculum.critiques import Writer
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.rewriter import RewriterAdapter
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.environments.coding.pipelines import PipelineEnvironment
from rla_lightning.models.specs import LanguageModelSpec, LoraSpec
from rla_lightning.rollout.servers.openai import OpenAIServer
from rla_lightning.types import Completion, ConfigError, Direction, EpisodeLog, Split, Task, TaskFeedback

OBJECTS, PLACES = ("apple", "bowl", "cup", "dish"), ("desk", "shelf", "table")
REASONS = ("usable", "truncated", "refused", "unchanged", "known", "invalid", "resembling", "repeated", "failed")
COUNTS = ("tasks", "unasked", "answers", "tokens", "fallbacks", "without", *REASONS)
CRITIQUE_COUNTS = ("written", "fallbacks", "unasked", "empty", "truncated", "tokens")
NONE_COUNTED = {f"rewrite_{name}": 0.0 for name in COUNTS} | {f"critique_{name}": 0.0 for name in CRITIQUE_COUNTS}


def make(item: str, place: str, parent: Task | None = None) -> Task:
    task_id = f"{item}-{place}"
    root, parent_id, version = (parent.root_id, parent.id, parent.version + 1) if parent else (task_id, None, 0)
    return Task(task_id, "tidy", {"item": item, "place": place}, 0.5, root, parent_id, version)


class Tidy(Environment):
    """An object belongs in a place: two boxed words in any order; nothing fits on the desk, dishes break."""

    name = "tidy"

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        return make(rng.choice(OBJECTS), rng.choice(PLACES))

    def start(self, task: Task) -> Episode:
        raise NotImplementedError

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> list[Task]:
        return [make("apple", "table", task)]

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        return "Nothing fits on the desk." if task.spec["place"] == "desk" else None

    def rewrite_prompt(self, task: Task, direction: Direction, critique: str, successes: int, rollouts: int) -> str | None:
        if task.spec["item"] == "bowl":
            return None
        return f"{task.spec['item']} {task.spec['place']} {direction} {successes}/{rollouts} {critique}"

    def apply_rewrite(self, task: Task, answer: str) -> Task | str:
        words = re.findall(r"\\boxed\{(\w+)\}", answer.rpartition("</think>")[2])[-2:]
        if "dish" in words:
            raise OSError("broken")
        item, place = [w for w in words if w in OBJECTS], [w for w in words if w in PLACES]
        return make(item[0], place[0], task) if item and place else "The answer names no object with a place."


def boxed(*words: str) -> str:
    return " ".join(f"\\boxed{{{word}}}" for word in words)


def completed(text: str) -> Completion:
    return Completion((), (), text, "TRUNCATED" if text.endswith("...") else "EOS")


class Scripted(RewriterAdapter):
    """Gives the answers of a table, by the first two words of the prompt, and notes what it was asked."""

    def __init__(self, table: dict[str, list[str]], folder: Path, **settings) -> None:
        super().__init__(LanguageModelSpec(path=str(folder)), **{"control_share": 0.0, **settings})
        self.table = table
        self.asked: list[list[str]] = []
        self.keys: list[str] = []

    def _answers(self, prompts: Sequence[str], keys: Sequence[str]) -> list[list[Completion]]:
        self.asked.append(list(prompts))
        self.keys.extend(keys)
        texts = [self.table.get(" ".join(prompt.split()[:2]), []) for prompt in prompts]
        return [
            [Completion((), (), t.removesuffix("..."), "TRUNCATED" if t.endswith("...") else "EOS") for t in ts] for ts in texts
        ]


def counted(adapter: RewriterAdapter) -> dict[str, float]:
    """Without the quality of predictions."""
    return {name: value for name, value in adapter.statistics().items() if name.startswith(("rewrite_", "critique_"))}


def constant(tasks: Sequence[Task]) -> list[float]:
    return [0.5] * len(tasks)


def never(tasks: Sequence[Task]) -> list[float]:
    raise AssertionError("the critic was asked")


def booked(pool: TaskPool, *feedback: TaskFeedback) -> tuple[TaskFeedback, ...]:
    pool.book(feedback)
    return feedback


def failed(pool: TaskPool, *tasks: Task) -> tuple[TaskFeedback, ...]:
    return booked(pool, *(TaskFeedback(task, 0, 8, None) for task in tasks))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama that reads and writes bytes, as `save_pretrained` leaves it."""
    place = tmp_path_factory.mktemp("model")
    alphabet = {token: index for index, token in enumerate(["<end>", *sorted(ByteLevel.alphabet())])}
    raw = Tokenizer(BPE(alphabet, merges=[]))
    raw.pre_tokenizer, raw.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [assistant] "
    tokenizer.save_pretrained(place)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(alphabet), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def test_the_first_valid_answer_is_proposed_and_no_critic_asked(folder: Path) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent, make("dish", "shelf")])
    feedback = booked(pool, TaskFeedback(parent, 7, 8, None, critiques=("Short.", "Short.", "Easy.")))
    answers = ["no idea", boxed("cup", "desk"), boxed("shelf", "apple"), boxed("cup", "shelf")]  # the third one is swapped
    adapter = Scripted({"cup table": answers}, folder, ranking="first")
    adapter.adapt(Tidy(), pool, feedback, never, "k")
    assert adapter.asked == [["cup table harder 7/8 Short. Easy."]]
    assert adapter.keys == ["k/rewrite/cup-table"]
    (proposal,) = pool.pending
    assert (proposal.task.id, proposal.parent_id, proposal.direction) == ("apple-shelf", "cup-table", "harder")
    assert (proposal.parent_successes, proposal.parent_rollouts, proposal.critique) == (7, 8, "Short. Easy.")
    assert proposal.predicted_success is None


def test_the_critic_chooses_among_the_valid_answers(folder: Path) -> None:
    # Parent 8/8, odds 17, predicted .9 (odds 9): expected odds are 17/9 of the predicted ones.
    #   .8 -> 7.56 -> .883    .3 -> .81 -> .447 (nearest to .5)    .1 -> .21 -> .173
    predicted = {"cup-table": 0.9, "apple-table": 0.8, "apple-shelf": 0.3, "cup-shelf": 0.1}
    calls = []

    def critic(tasks: Sequence[Task]) -> list[float]:
        calls.append([task.id for task in tasks])
        return [predicted[task.id] for task in tasks]

    parent = make("cup", "table")
    pool = TaskPool([parent])
    feedback = booked(pool, TaskFeedback(parent, 8, 8, None))
    answers = [boxed("apple", "table"), boxed("cup", "shelf"), boxed("apple", "shelf"), boxed("cup", "desk")]
    Scripted({"cup table": answers}, folder).adapt(Tidy(), pool, feedback, critic, "k")
    assert calls == [["cup-table", "apple-table", "cup-shelf", "apple-shelf"]]
    assert pool.pending[0].task.id == "apple-shelf"
    assert pool.pending[0].predicted_success == 0.3


def test_every_answer_is_counted_once_by_what_became_of_it(folder: Path) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent, make("apple", "table")])
    feedback = failed(pool, parent)
    answers = [
        boxed("cup", "shelf"),
        f"<think>perhaps {boxed('apple', 'shelf')}...",
        "garbage",
        boxed("cup"),
        boxed("cup", "table"),
        boxed("apple", "table"),
        boxed("apple", "desk"),
        boxed("shelf", "cup"),
        boxed("dish", "table"),
        boxed("apple", "shelf"),
    ]
    adapter = Scripted({"cup table": answers}, folder, ranking="first")
    adapter.adapt(Tidy(), pool, feedback, never, "k")
    assert [proposal.task.id for proposal in pool.pending] == ["cup-shelf"]
    assert counted(adapter) == NONE_COUNTED | {
        "rewrite_tasks": 1.0,
        "rewrite_answers": 10.0,
        "rewrite_usable": 2.0,  # cup-shelf, apple-shelf
        "rewrite_truncated": 1.0,
        "rewrite_refused": 2.0,  # garbage, one box
        "rewrite_unchanged": 1.0,  # cup-table
        "rewrite_known": 1.0,  # apple-table
        "rewrite_invalid": 1.0,  # apple-desk
        "rewrite_repeated": 1.0,  # cup-shelf, swapped
        "rewrite_failed": 1.0,  # dish
    }
    adapter.adapt(Tidy(), pool, booked(pool), never, "k2")
    assert counted(adapter) == NONE_COUNTED  # of the latest call only


class Wary(Tidy):
    """Finds tasks alike that have the same object; notes what it is asked."""

    def __init__(self) -> None:
        self.compared: list[tuple[str, list[str]]] = []
        self.validated: list[str] = []

    def resembles(self, task: Task, earlier: Sequence[Task]) -> bool:
        self.compared.append((task.id, [known.id for known in earlier]))
        return any(task.spec["item"] == known.spec["item"] for known in earlier)

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        self.validated.append(task.id)
        return super().validate(task, parent)


def test_a_rewrite_that_resembles_an_earlier_task_is_counted_and_never_proposed(folder: Path) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent, make("dish", "shelf")])
    feedback = failed(pool, parent)
    answers = [boxed("cup", "shelf"), boxed("cup", "desk"), boxed("apple", "shelf"), boxed("cup", "table")]
    environment, adapter = Wary(), Scripted({"cup table": answers}, folder, ranking="first")
    adapter.adapt(environment, pool, feedback, never, "k")
    assert [proposal.task.id for proposal in pool.pending] == ["apple-shelf"]
    earlier = ["cup-table", "dish-shelf"]
    assert environment.compared == [("cup-shelf", earlier), ("cup-desk", earlier), ("apple-shelf", earlier)]  # not the known one
    assert environment.validated == ["apple-shelf"]  # running programs takes time: what is refused anyway is not validated
    assert counted(adapter) == NONE_COUNTED | {
        "rewrite_tasks": 1.0,
        "rewrite_answers": 4.0,
        "rewrite_usable": 1.0,
        "rewrite_resembling": 2.0,
        "rewrite_unchanged": 1.0,
    }


def test_where_all_rewrites_resemble_earlier_tasks_there_is_no_proposal(folder: Path) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent])
    adapter = Scripted({"cup table": [boxed("cup", "shelf"), boxed("cup", "shelf")]}, folder, ranking="first")
    adapter.adapt(Wary(), pool, failed(pool, parent), never, "k")
    assert pool.pending == ()
    assert counted(adapter) == NONE_COUNTED | {
        "rewrite_tasks": 1.0,
        "rewrite_answers": 2.0,
        "rewrite_resembling": 2.0,
        "rewrite_without": 1.0,
    }


def test_thoughts_are_no_answer(folder: Path) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent])
    answer = f"<think>{boxed('apple', 'table')} or not</think>{boxed('apple', 'shelf')}"
    Scripted({"cup table": [answer]}, folder).adapt(Tidy(), pool, failed(pool, parent), constant, "k")
    assert pool.pending[0].task.id == "apple-shelf"


@pytest.mark.parametrize("answers", [[], ["garbage"] * 8, [boxed("cup", "table")] * 8])
def test_nothing_is_proposed_without_a_valid_answer(folder: Path, answers: list[str]) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent])
    adapter = Scripted({"cup table": answers}, folder)
    adapter.adapt(Tidy(), pool, failed(pool, parent), never, "k")
    assert pool.pending == ()
    assert adapter.statistics()["rewrite_without"] == 1.0


def test_the_environments_own_variants_can_step_in(folder: Path) -> None:
    # The bowl has no question, the cup no valid answer, the dish a valid one; all that `vary` offers is apple-table.
    tasks = [make("bowl", "table"), make("cup", "table"), make("dish", "table")]
    pool = TaskPool(tasks)
    adapter = Scripted({"dish table": [boxed("cup", "shelf")]}, folder, ranking="first", parametric_fallback=True)
    adapter.adapt(Tidy(), pool, failed(pool, *tasks), never, "k")
    assert sorted(proposal.task.id for proposal in pool.pending) == ["apple-table", "cup-shelf"]
    counts = adapter.statistics()
    assert (counts["rewrite_tasks"], counts["rewrite_unasked"], counts["rewrite_answers"]) == (3.0, 2.0, 1.0)
    assert (counts["rewrite_fallbacks"], counts["rewrite_without"]) == (2.0, 0.0)


def test_all_tasks_outside_the_band_are_asked_at_once_and_no_others(folder: Path) -> None:
    tasks = [make("cup", "table"), make("apple", "table"), make("apple", "shelf"), make("bowl", "shelf")]
    pool = TaskPool(tasks)
    feedback = booked(pool, *(TaskFeedback(t, s, 8, None) for t, s in zip(tasks, (0, 8, 4, 0), strict=True)))
    adapter = Scripted({}, folder)
    adapter.adapt(Tidy(), pool, feedback, never, "k")
    assert [sorted(prompts) for prompts in adapter.asked] == [["apple table harder 8/8 ", "cup table easier 0/8 "]]
    assert adapter.statistics()["rewrite_unasked"] == 2.0 + 1.0  # the bowl, and two for which the table has no answers


def test_two_tasks_that_become_the_same_one(folder: Path) -> None:
    # The first to propose cup-shelf gets it; the other takes its next answer, or has none.
    for second, proposed in [(boxed("apple", "shelf"), ["apple-shelf", "cup-shelf"]), (boxed("cup", "desk"), ["cup-shelf"])]:
        tasks = [make("cup", "table"), make("apple", "table")]
        pool = TaskPool(tasks)
        answers = [boxed("cup", "shelf"), second]
        adapter = Scripted({"cup table": answers, "apple table": answers}, folder, ranking="first")
        adapter.adapt(Tidy(), pool, failed(pool, *tasks), never, "k")
        assert sorted(proposal.task.id for proposal in pool.pending) == proposed


def test_max_proposals_goes_to_the_next_in_line_when_an_answer_fails(folder: Path) -> None:
    tasks = [make(item, "table") for item in ("cup", "apple", "dish")]
    for good in ("cup table", "apple table", "dish table"):  # whichever comes first in the order of the key
        pool = TaskPool(tasks)
        feedback = failed(pool, *tasks)
        adapter = Scripted({good: [boxed("cup", "shelf")]}, folder, ranking="first", max_proposals=1)
        adapter.adapt(Tidy(), pool, feedback, never, "k")
        assert [proposal.parent_id for proposal in pool.pending] == [good.replace(" ", "-")]
        assert all(len(prompts) == 1 for prompts in adapter.asked)
        assert adapter.statistics()["rewrite_tasks"] == len(adapter.asked)
        adapter.adapt(Tidy(), pool, feedback, never, "k2")  # no room
        assert adapter.statistics()["rewrite_tasks"] == 0.0


def test_an_error_of_the_environment_costs_its_task_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Tidy):
        def rewrite_prompt(self, task, direction, critique, successes, rollouts):
            if task.spec["item"] == "apple":
                raise OSError("no paper")
            return super().rewrite_prompt(task, direction, critique, successes, rollouts)

    tasks = [make("apple", "table"), make("cup", "table")]
    pool = TaskPool(tasks)
    adapter = Scripted({"cup table": [boxed("dish", "shelf"), boxed("cup", "shelf")]}, folder)
    adapter.adapt(Broken(), pool, failed(pool, *tasks), constant, "k")
    assert [proposal.task.id for proposal in pool.pending] == ["cup-shelf"]
    assert "no question about task apple-table: OSError: no paper" in caplog.text
    assert "a rewrite of task cup-table failed: OSError: broken" in caplog.text
    assert (adapter.statistics()["rewrite_unasked"], adapter.statistics()["rewrite_failed"]) == (1.0, 1.0)


def test_refused_answers_can_be_read_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent])
    with caplog.at_level(logging.INFO, "rla_lightning"):
        adapter = Scripted({"cup table": ["tea", boxed("cup", "desk")]}, folder)
        adapter.adapt(Tidy(), pool, failed(pool, parent), never, "k")
    assert "a rewrite of task cup-table is refused: The answer names no object with a place." in caplog.text
    assert "a rewrite of task cup-table is invalid: Nothing fits on the desk." in caplog.text


def test_an_environment_that_cannot_ask_is_refused(folder: Path) -> None:
    class Silent(Tidy):
        rewrite_prompt = Environment.rewrite_prompt

    with pytest.raises(ConfigError, match=r"environment 'tidy' has no rewrite_prompt.*ParametricAdapter"):
        EnvironmentDataModule(Silent(), Scripted({}, folder))
    with pytest.raises(ConfigError, match=r"environment 'pipelines' has no rewrite_prompt.*ParametricAdapter"):
        EnvironmentDataModule(PipelineEnvironment(), Scripted({}, folder))


def test_a_fallback_needs_variants(folder: Path) -> None:
    class Fixed(Tidy):
        vary = Environment.vary

    with pytest.raises(ConfigError, match="environment 'tidy' has no vary to fall back on: set parametric_fallback to false"):
        EnvironmentDataModule(Fixed(), Scripted({}, folder, parametric_fallback=True))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"attempts": 0}, "attempts must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"sampler_tokens": -1}, "sampler_tokens must be at least 1, got -1"),
        ({"temperature": -0.5}, "temperature must not be negative, got -0.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"ranking": "random"}, "ranking must be one of first, critic, knobs, both, got 'random'"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"low": 0.9}, "low <= target <= high"),
        ({"max_proposals": 0}, "max_proposals must be at least 1 or null, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder: Path, setting: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewriterAdapter(LanguageModelSpec(path=str(folder)), **setting)


def test_models_that_would_have_to_be_trained_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a pretrained model: set its model\.path, got null"):
        RewriterAdapter(LanguageModelSpec())
    with pytest.raises(ConfigError, match=r"model.lora must be null, got LoraSpec\(rank=2"):
        RewriterAdapter(LanguageModelSpec(path=str(folder), lora=LoraSpec(rank=2)))


# With a real, if random, language model


class Letters(Tidy):
    """Any answer is a task: its first two characters."""

    def rewrite_prompt(self, task: Task, direction: Direction, critique: str, successes: int, rollouts: int) -> str | None:
        return f"{task.id} {direction} {critique}"

    def apply_rewrite(self, task: Task, answer: str) -> Task | str:
        return make(answer[:1], answer[1:2], task)


def written(adapter: RewriterAdapter, key: str, critique: str = "", tasks: int = 3) -> tuple[list[str], dict[str, float]]:
    parents = [make("cup", str(number)) for number in range(tasks)]
    pool = TaskPool(parents)
    feedback = booked(pool, *(TaskFeedback(task, 0, 8, None, critiques=(critique,)) for task in parents))
    adapter.adapt(Letters(), pool, feedback, constant, key)
    return [f"{proposal.parent_id}: {proposal.task.id}" for proposal in pool.pending], counted(adapter)


def rewriter(folder: Path, **settings) -> RewriterAdapter:
    defaults = {"control_share": 0.0, "attempts": 8, "max_new_tokens": 40, "temperature": 1.0, "top_p": 1.0, "device": "cpu"}
    return RewriterAdapter(LanguageModelSpec(path=str(folder)), **(defaults | settings))


def test_a_model_from_disk_writes_the_same_for_the_same_key(folder: Path) -> None:
    adapter = rewriter(folder)
    first, counts = written(adapter, "k")
    assert counts["rewrite_answers"] == 3 * 8
    assert sum(counts[f"rewrite_{reason}"] for reason in REASONS) == 3 * 8
    assert counts["rewrite_truncated"] > 0  # random bytes rarely end
    assert first
    torch.manual_seed(1)
    assert written(adapter, "k") == (first, counts)
    assert written(rewriter(folder), "k") == (first, counts)  # as after a resume
    assert written(rewriter(folder, sampler_tokens=1), "k") == (first, counts)  # one row at a time
    assert written(adapter, "other")[0] != first


def test_sampling_leaves_torchs_generator_alone(folder: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    written(rewriter(folder), "k")
    assert torch.rand(2).tolist() == expected


def test_a_prompt_that_leaves_no_room_is_not_asked(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Context 128, answer 40. "[user] cup-0 easier " + critique + " [assistant] " is 33 bytes and the critique.
    _, counts = written(rewriter(folder), "k", critique="x" * 55, tasks=1)
    assert counts["rewrite_answers"] == 8.0
    _, counts = written(rewriter(folder), "k", critique="x" * 56, tasks=1)
    assert (counts["rewrite_unasked"], counts["rewrite_answers"], counts["rewrite_without"]) == (1.0, 0.0, 1.0)
    assert "k/rewrite/cup-0: a prompt of 89 tokens is too long for the rewriter (88)" in caplog.text


def test_an_answer_as_long_as_the_context_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens 128 leaves no room for a prompt in its context of 128 tokens"):
        written(rewriter(folder, max_new_tokens=128), "k")


def test_weights_move_to_the_device_only_while_they_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the `meta` device weights are lost, which shows the way there and is no way back: count the moves instead."""
    for offload, moves in [(True, ["meta", "cpu"]), (False, ["meta"])]:
        adapter = rewriter(folder, device="meta", offload=offload)
        loaded = adapter._load()
        seen: list[str] = []
        monkeypatch.setattr(loaded.model, "to", lambda device, seen=seen: seen.append(str(device)))
        with adapter._placed(loaded):
            assert seen == ["meta"]
        assert seen == moves


def test_yaml_names_the_rewriter_by_class_path(folder: Path) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--adapter", type=TaskAdapter | None)
    settings = {"model": {"path": str(folder), "dtype": "bfloat16"}, "attempts": 3, "ranking": "first"}
    config = {"class_path": "rla_lightning.curriculum.rewriter.RewriterAdapter", "init_args": settings}
    adapter = parser.instantiate_classes(parser.parse_object({"adapter": config})).adapter
    assert isinstance(adapter, RewriterAdapter)
    assert adapter.model == LanguageModelSpec(path=str(folder), dtype="bfloat16")
    assert (adapter.attempts, adapter.predictor, adapter.device) == (3, None, None)


# Two processes


def _two_ranks(rank: int, store: str, folder: Path, body: Callable[[int, Path], str], report: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    Path(f"{report}-{rank}").write_text(body(rank, folder))
    dist.destroy_process_group()


def on_two_ranks(body: Callable[[int, Path], str], folder: Path, place: Path) -> list[str]:
    fork = multiprocessing.get_context("fork")
    arguments = (str(place / "store"), folder, body, str(place / "report"))
    workers = [fork.Process(target=_two_ranks, args=(rank, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0, 0]
    return [(place / f"report-{rank}").read_text() for rank in range(2)]


class FirstRankOnly(Scripted):
    def _answers(self, prompts: Sequence[str], keys: Sequence[str]) -> list[list[Completion]]:
        assert dist.get_rank() == 0
        if prompts[0].startswith("dish"):
            raise ConfigError("the model is gone")
        return super()._answers(prompts, keys)


def _adapt(rank: int, folder: Path) -> str:
    parent = make("cup", "table")
    pool = TaskPool([parent])
    adapter = FirstRankOnly({"cup table": ["garbage", boxed("cup", "shelf")]}, folder)
    predicted = Predictions()
    adapter.adapt(Tidy(), pool, failed(pool, parent), predicted, "k")
    return f"{[p.task.id for p in pool.pending]} {predicted.calls} {adapter.statistics()['rewrite_refused']} {len(adapter.asked)}"


class Predictions:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tasks: Sequence[Task]) -> list[float]:
        self.calls += 1
        return [0.5] * len(tasks)


class Critic(Scripted):
    """Writes critiques that name the task they are of."""

    def _writer(self) -> Writer:
        def answer(prompts: Sequence[tuple[int, ...]], keys: Sequence[str]) -> list[Completion]:
            assert not dist.is_initialized() or dist.get_rank() == 0
            return [Completion((1, 2), (), key.rpartition("/critique/")[2] + ".", "EOS") for key in keys]

        return Writer(AutoTokenizer.from_pretrained(self.model.path), 10**6, answer)


def with_log(task: Task, successes: int = 0) -> TaskFeedback:
    return TaskFeedback(task, successes, 8, None, ("Lost.",), logs=(EpisodeLog(("[0] Observed",), False, "DONE"),))


def _criticise(rank: int, folder: Path) -> str:
    tasks = [make("cup", "table"), make("apple", "table")]
    pool = TaskPool(tasks)
    adapter = Critic({"cup table": [boxed("cup", "shelf")], "apple table": [boxed("apple", "shelf")]}, folder, ranking="first")
    adapter.adapt(Tidy(), pool, booked(pool, *map(with_log, tasks)), never, "k")
    return f"{sorted(p.critique for p in pool.pending)} {counted(adapter)['critique_tokens']}"


def test_the_first_process_writes_critiques_for_all(folder: Path, tmp_path: Path) -> None:
    assert on_two_ranks(_criticise, folder, tmp_path) == ["['apple-table/0.', 'cup-table/0.'] 4.0"] * 2


def test_critiques_are_written_of_tasks_that_the_model_is_asked_about(folder: Path) -> None:
    # Room for one proposal: the first in line gets a critique; the second, asked in its place, comes with the template's.
    tasks = [make("cup", "table"), make("apple", "table")]
    pool = TaskPool(tasks)
    adapter = Critic({}, folder, max_proposals=1)
    adapter.adapt(Tidy(), pool, booked(pool, *map(with_log, tasks)), never, "k")
    asked = [prompts[0].split()[-1] for prompts in adapter.asked]
    assert asked in (["cup-table/0.", "Lost."], ["apple-table/0.", "Lost."])
    assert (counted(adapter)["critique_written"], counted(adapter)["critique_fallbacks"]) == (1.0, 0.0)
    adapter.adapt(Tidy(), pool, booked(pool), never, "k2")
    assert counted(adapter) == NONE_COUNTED


def test_controls_need_no_critique(folder: Path) -> None:
    parent = make("cup", "table")
    pool = TaskPool([parent])
    adapter = Critic({}, folder, ranking="first", control_share=0.999)
    adapter.adapt(Tidy(), pool, booked(pool, with_log(parent)), never, "k")
    assert [(proposal.is_control, proposal.critique) for proposal in pool.pending] == [(True, "Lost.")]
    assert counted(adapter) == NONE_COUNTED


def _fail(rank: int, folder: Path) -> str:
    parent = make("dish", "table")
    pool = TaskPool([parent])
    try:
        FirstRankOnly({}, folder).adapt(Tidy(), pool, failed(pool, parent), constant, "k")
    except ConfigError as error:
        return str(error)
    return "no error"


class VariedOnce(Tidy):
    """Offers what no two processes would agree on."""

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> list[Task]:
        return [make(("apple", "bowl")[dist.get_rank()], "shelf", task)]


def _vary(rank: int, folder: Path) -> str:
    parent = make("cup", "table")
    pool = TaskPool([parent])
    predicted = Predictions()
    ParametricAdapter().adapt(VariedOnce(), pool, failed(pool, parent), predicted, "k")
    return f"{[p.task.id for p in pool.pending]} {predicted.calls}"


def test_the_first_process_varies_tasks_for_all(folder: Path, tmp_path: Path) -> None:
    assert on_two_ranks(_vary, folder, tmp_path) == ["['apple-shelf'] 1", "['apple-shelf'] 1"]


def test_the_first_process_asks_for_all(folder: Path, tmp_path: Path) -> None:
    assert on_two_ranks(_adapt, folder, tmp_path) == ["['cup-shelf'] 1 1.0 1", "['cup-shelf'] 1 1.0 0"]


def test_an_error_of_the_first_process_ends_all(folder: Path, tmp_path: Path) -> None:
    assert on_two_ranks(_fail, folder, tmp_path) == ["the model is gone", "process 0 failed: ConfigError: the model is gone"]


def test_a_server_writes_in_place_of_a_model(folder: Path, completions_server) -> None:
    url, asked = completions_server(lambda body: f"z{body['seed'] % 10}")
    adapter = rewriter(folder, server=OpenAIServer(url, "writer"))
    proposals, counts = written(adapter, "k")
    assert len(asked) == counts["rewrite_answers"] == 3 * 8
    assert counts["rewrite_tokens"] >= 3 * 8 * 2  # a letter and a digit
    assert proposals
    assert all(": z-" in proposal for proposal in proposals)
    assert all("[user] cup-" in body["prompt"] for body in asked)
    assert not list(adapter._load().model.parameters())  # the tokenizer alone
    with pytest.raises(ConfigError, match="must name its tokenizer"):
        RewriterAdapter(None, server=OpenAIServer("http://127.0.0.1:9/v1", "writer"))
    with pytest.raises(ConfigError, match=r"model\.weights is false: set its server"):
        RewriterAdapter(LanguageModelSpec(path=str(folder), weights=False))
