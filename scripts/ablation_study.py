"""What a study is: its YAML file, checked, and the resolved settings of its variants."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rla_lightning import cli
from rla_lightning.types import ConfigError

Settings = dict[str, Any]  # all of a run's, as --print_config and config.yaml have them
NOT_COMPARED = ("seed_everything", "experiment", "runs", "ckpt_path", "weights_only")  # who a run is and how it was started
WHOLE_RUNS: dict[str, tuple[object, ...]] = {  # trainer settings that play every epoch
    "max_steps": (-1,), "max_time": (None,), "limit_train_batches": (None, 1, 1.0), "fast_dev_run": (False,)
}  # fmt: skip
KINDS = ("before", "after", "gain", "summary", "mean", "last")
MEASURES = {  # label in the table: kind of number, metric; * stands for whatever a run has there
    "success in domain, before": "before:in_domain/rollout/success_rate",
    "success in domain, after": "after:in_domain/rollout/success_rate",
    "success in domain, gain": "gain:in_domain/rollout/success_rate",
    "success OOD, before": "before:out_of_distribution/rollout/success_rate",
    "success OOD, after": "after:out_of_distribution/rollout/success_rate",
    "success OOD, gain": "gain:out_of_distribution/rollout/success_rate",
    "success in domain at difficulty *": "after:in_domain/rollout/success_rate_at/*",
    "success OOD at difficulty *": "after:out_of_distribution/rollout/success_rate_at/*",
    "right-step rate in domain": "after:in_domain/rollout/right_step_rate",
    "right-step rate OOD": "after:out_of_distribution/rollout/right_step_rate",
    "invalid actions in domain": "after:in_domain/rollout/invalid_action_rate",
    "invalid actions OOD": "after:out_of_distribution/rollout/invalid_action_rate",
    "invalid actions (training mean)": "mean:rollout/invalid_action_rate",
    "groups with a signal (training mean)": "mean:rollout/groups_with_signal",
    "judge samples (training mean)": "mean:reward_model/samples",
    "process accuracy, before": "before:in_domain/reward_model/process_accuracy",
    "process accuracy, after": "after:in_domain/reward_model/process_accuracy",
    "process accuracy, gain": "gain:in_domain/reward_model/process_accuracy",
    "judge true positive rate": "after:in_domain/reward_model/true_positive_rate",
    "judge true negative rate": "after:in_domain/reward_model/true_negative_rate",
    "judge mu": "after:in_domain/reward_model/mu",
    "judge mu on the policy's steps": "after:in_domain/reward_model_on_policy/mu",
    "accepted": "summary:accepted_tasks",
    "proposed": "summary:proposed_tasks",
    "difficulty of the pool (last)": "last:env/difficulty",
    "false accept rate (last)": "last:env/false_accept_rate",
    "seconds": "summary:seconds",
}


@dataclass(frozen=True)
class Variant:
    """What sets one side of the study apart."""

    name: str
    configs: tuple[str, ...]  # on top of the study's
    arguments: tuple[str, ...]  # e.g. --model.reward.score_weight=4.0


@dataclass(frozen=True)
class Study:
    """One YAML file: variants x seeds, and what is compared.

    Args:
        config: the main config, or several.
        overlays: further configs for all variants.
        seeds: of the reported runs.
        tuning_seeds: on which settings were chosen; none of them may be reported.
        runs: folder of this study and of no other.
        parallel: processes at a time, one thread each.
        variants: by name.
        contrasts: pairs of variants; the second is subtracted from the first.
        measures: what is reported: a label and KIND:METRIC. before, after and gain are of the test sets, summary is a key
            of summary.json, mean and last are of metrics.csv.
        unequal_rollouts: whether variants may have different numbers of rollouts.
    """

    config: tuple[str, ...]
    overlays: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: Path
    variants: tuple[Variant, ...]
    tuning_seeds: tuple[int, ...] = ()
    parallel: int = 1
    contrasts: tuple[tuple[str, str], ...] = ()
    measures: Mapping[str, str] = field(default_factory=lambda: dict(MEASURES))
    unequal_rollouts: bool = False

    def __post_init__(self) -> None:
        if not self.variants or not self.seeds or not self.config:
            raise ConfigError("a study needs at least one config, one variant and one seed")
        if repeated := {seed for seed in self.seeds if self.seeds.count(seed) > 1}:
            raise ConfigError(f"seeds has {min(repeated)} twice")
        if met := set(self.seeds) & set(self.tuning_seeds):
            raise ConfigError(f"seed {min(met)} is in tuning_seeds and in seeds: it would be reported after settings fit it")
        if self.parallel < 1:
            raise ConfigError(f"parallel must be at least 1, got {self.parallel}")
        names = [variant.name for variant in self.variants]
        for name in names:
            if not name or "/" in name or name.startswith("."):
                raise ConfigError(f"variant {name!r} cannot be the name of a folder")
        for name in (name for pair in self.contrasts for name in pair):
            if name not in names:
                raise ConfigError(f"contrasts name {name!r}, which is no variant")
        for label, source in self.measures.items():
            kind, _, metric = source.partition(":")
            if kind not in KINDS or not metric:
                raise ConfigError(f"measure {label!r} must be one of {', '.join(KINDS)}, a colon and a metric, got {source!r}")
            if source.endswith("*") != ("*" in label):
                raise ConfigError(f"measure {label!r} and {source!r} must both have a *, or none of them")

    def arguments(self, variant: Variant, seed: int) -> list[str]:
        """Of `rla fit`."""
        configs = [word for file in (*self.config, *self.overlays, *variant.configs) for word in ("--config", file)]
        place = ["--runs", str(self.runs), "--experiment", variant.name, "--seed_everything", str(seed)]
        return [*configs, *variant.arguments, *place]


def read_study(file: Path) -> Study:
    if not file.is_file():
        raise ConfigError(f"there is no study {str(file)!r}")
    try:
        raw = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must have keys and values")
    known = {item.name for item in fields(Study)}
    if unknown := raw.keys() - known:
        raise ConfigError(f"{file} has the unknown key {min(map(str, unknown))!r}; known are {', '.join(sorted(known))}")
    if missing := {"config", "seeds", "runs", "variants"} - raw.keys():
        raise ConfigError(f"{file} needs the key {min(missing)!r}")
    if not isinstance(raw["variants"], dict):
        raise ConfigError(f"variants must be names with configs, got {raw['variants']!r}")
    contrasts = [_texts("contrasts", pair) for pair in raw.get("contrasts") or []]
    if odd := [pair for pair in contrasts if len(pair) != 2]:
        raise ConfigError(f"a contrast is two variants, got {list(odd[0])}")
    parallel, unequal = raw.get("parallel", 1), raw.get("unequal_rollouts", False)
    if not isinstance(parallel, int) or not isinstance(unequal, bool):
        raise ConfigError(f"parallel must be a number and unequal_rollouts true or false, got {parallel!r} and {unequal!r}")
    return Study(
        config=_texts("config", raw["config"]),
        overlays=_texts("overlays", raw.get("overlays") or []),
        seeds=_numbers("seeds", raw["seeds"]),
        runs=Path(str(raw["runs"])),
        variants=tuple(_variant(str(name), given) for name, given in raw["variants"].items()),
        tuning_seeds=_numbers("tuning_seeds", raw.get("tuning_seeds") or []),
        parallel=parallel,
        contrasts=tuple((first, second) for first, second in contrasts),
        measures={str(label): str(source) for label, source in (raw.get("measures") or MEASURES).items()},
        unequal_rollouts=unequal,
    )


def _variant(name: str, given: object) -> Variant:
    """Of a list of configs, or of a mapping with configs and arguments."""
    given = {"configs": given} if not isinstance(given, dict) else given
    if unknown := given.keys() - {"configs", "arguments"}:
        raise ConfigError(f"variant {name!r} has the unknown key {min(map(str, unknown))!r}; known are configs, arguments")
    arguments = given.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise ConfigError(f"arguments of variant {name!r} must be names and values, got {arguments!r}")
    words = (f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in arguments.items())
    return Variant(name, _texts(f"configs of variant {name!r}", given.get("configs") or []), tuple(words))


def _texts(name: str, given: object) -> tuple[str, ...]:
    values = given if isinstance(given, list) else [given]
    if not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{name} must be a list of texts, got {given!r}")
    return tuple(values)


def _numbers(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(isinstance(value, int) and not isinstance(value, bool) for value in given):
        raise ConfigError(f"{name} must be a list of whole numbers, got {given!r}")
    return tuple(given)


def resolve(study: Study) -> dict[str, Settings]:
    """The settings of every variant, parsed as a run parses them; refuses what cannot be compared."""
    settings = {variant.name: _printed(variant.name, study.arguments(variant, study.seeds[0])) for variant in study.variants}
    rollouts = {name: _rollouts(name, found) for name, found in settings.items()}
    for (name, number), (other, others) in pairwise(rollouts.items()):
        if number != others and not study.unequal_rollouts:
            raise ConfigError(
                f"variant {other!r} has {others} rollouts and {name!r} has {number} (tasks_per_iteration x group_size x "
                "max_epochs): they cannot be compared; unequal_rollouts: true lets them be"
            )
    return settings


def _printed(name: str, arguments: Sequence[str]) -> Settings:
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main(["fit", *arguments, "--print_config"])
    except SystemExit as end:
        if end.code:
            raise ConfigError(f"variant {name!r}: {err.getvalue().strip().removeprefix('rla: error: ')}") from None
    found = yaml.safe_load(out.getvalue())
    assert isinstance(found, dict)
    return found


def _rollouts(name: str, settings: Settings) -> int:
    data, rollout, trainer = settings["data"], settings["model"]["rollout"], settings["trainer"]
    if trainer["max_epochs"] is None or trainer["max_epochs"] < 1:
        raise ConfigError(f"variant {name!r}: trainer.max_epochs must be at least 1, got {trainer['max_epochs']}")
    for key, whole in WHOLE_RUNS.items():
        if trainer[key] not in whole:
            raise ConfigError(f"variant {name!r}: trainer.{key} must be {whole[0]}, as it cuts runs short, got {trainer[key]}")
    return int(data["tasks_per_iteration"] * rollout["group_size"] * trainer["max_epochs"])


def first_difference(now: Settings, then: Settings) -> str:
    """Where a run's settings are not those of now, in words; empty when they are the same."""
    a, b = dict(_leaves(now, "")), dict(_leaves(then, ""))
    for name in sorted(a.keys() | b.keys()):
        if name not in NOT_COMPARED and a.get(name, "absent") != b.get(name, "absent"):
            return f"{name} was {b.get(name, 'absent')!r} and is {a.get(name, 'absent')!r}"
    return ""


def _leaves(settings: Mapping[str, Any], place: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found += _leaves(value, f"{place}{name}.") if isinstance(value, dict) and value else [(f"{place}{name}", value)]
    return found
