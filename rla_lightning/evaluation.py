"""How good the three models are on held-out tasks, as numbers and as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from rich.table import Table

from rla_lightning.distributed import failing_together, share, unshare
from rla_lightning.environments.base import TestedEnvironment
from rla_lightning.measure import measure, on_fixed_steps, precision_metrics, task_votes
from rla_lightning.metrics import SuccessBreakdown
from rla_lightning.metrics_code import PassMetrics
from rla_lightning.rollout.players import Players, Progress
from rla_lightning.types import EvaluationSet, Purpose

SUCCESS = "rollout/success_rate"
PASS_AT = (1, 2, 4, 8, 16, 32)
ROWS = {  # of the table, below success: label, metric
    "mean turns": "rollout/mean_turns",
    "mean turns, won": "rollout/mean_turns_won",
    "invalid actions": "rollout/invalid_action_rate",
    "outgrew the context": "rollout/truncated_rate",
    "failed in the environment": "rollout/env_error_rate",
    "right steps": "rollout/right_step_rate",
    "hidden tests passed": "code/pass_ratio",
    **{f"pass@{k}": f"code/pass@{k}" for k in PASS_AT[1:]},  # pass@1 is the success
    "tests: right programs pass (UT)": "reward_model/ut",
    "tests: and wrong ones fail (Detect)": "reward_model/detect",
    "tests: UT on the policy's programs": "reward_model_on_policy/ut",
    "tests: Detect on the policy's programs": "reward_model_on_policy/detect",
    "judge: process accuracy": "reward_model/process_accuracy",
    "judge: true positive rate": "reward_model/true_positive_rate",
    "judge: true negative rate": "reward_model/true_negative_rate",
    "judge: outcome accuracy": "reward_model/outcome_accuracy",
    "judge: mu on the policy's steps": "reward_model_on_policy/mu",
    "judge: unreadable votes": "reward_model/parse_error_rate",
    "critic: Brier score": "critic/brier",
    "critic: Brier score, best constant": "critic/brier_constant",
}


def evaluate(players: Players, batch: EvaluationSet, key: str, device: torch.device, progress: Progress) -> dict[str, float]:
    """Success, judge and critic metrics on held-out tasks, sampled at the training temperature.

    The reward model is judged on fixed steps, those of a scripted agent or known right and wrong programs of the same
    tasks (as in the paper, where a frozen one's accuracy does not move with the policy), and on the policy's own as
    `reward_model_on_policy`. The draws are the same at every call, so differences come from the models.

    Args:
        players: the models; each process plays its share of the tasks.
        batch: tasks, the same in every process.
        key: of the random draws.
        device: where processes exchange their sums.
        progress: told what is happening.
    """
    settings = players.settings
    with failing_together():
        mine = players.play(
            share(batch.tasks),
            settings.eval_samples,
            key,
            max_turns=settings.eval_max_turns,
            with_labels=True,
            progress=progress,
        )
        mine = players.judge(mine, key)
        values = [players.state_values(group) for group in mine]
        fixed = players.judge(players.explore(share(batch.tasks), f"explore/{batch.split}"), f"{key}/fixed")
    kinds = sorted(_kinds(batch))
    breakdown = SuccessBreakdown(kinds, settings.eval_samples).to(device)
    breakdown.update(mine)
    metrics = measure(mine, values, device)
    metrics |= {f"rollout/{name}": float(value) for name, value in breakdown.compute().items()}
    if isinstance(players.environment, TestedEnvironment):
        passes = PassMetrics(settings.eval_samples, PASS_AT).to(device)
        passes.update(mine)
        metrics |= {f"code/{name}": float(value) for name, value in passes.compute().items()}
    precision = precision_metrics(unshare(task_votes(mine)))
    metrics |= {f"reward_model/{name}": value for name, value in precision.items()}
    tests_of = kinds if players.formats.test is not None else None
    return on_fixed_steps(metrics, mine, fixed, device, tests_of)


def evaluation_table(purpose: Purpose, metrics: Mapping[str, float], sets: Sequence[EvaluationSet]) -> Table:
    """The main numbers of one evaluation, a column per split; success also per kind of task.

    Args:
        purpose: of the evaluation, the first part of the metrics' names.
        metrics: by name, `test/in_domain/rollout/success_rate`; splits without any are left out.
        sets: the tasks that were evaluated.
    """
    shown = [batch for batch in sets if f"{purpose}/{batch.split}/{SUCCESS}" in metrics]
    table = Table(title=purpose)
    table.add_column("")
    for batch in shown:
        table.add_column(batch.split.replace("_", " "), justify="right")

    def number(batch: EvaluationSet, name: str) -> str:
        value = metrics.get(f"{purpose}/{batch.split}/{name}", math.nan)
        return "-" if math.isnan(value) else f"{value:.3f}"

    spreads = [number(batch, f"{SUCCESS}_std") for batch in shown]
    cells = [
        number(batch, SUCCESS) + ("" if spread == "-" else f" ± {spread}") for batch, spread in zip(shown, spreads, strict=True)
    ]
    table.add_row("tasks (of a kind)", *(str(len(batch.tasks)) for batch in shown))
    table.add_row("success" + ("" if {*spreads} <= {"-"} else " ± deviation of the samples"), *cells)
    for kind in sorted({kind for batch in shown for kind in _kinds(batch)}):
        cells = [f"{number(batch, f'{SUCCESS}/{kind}')} ({_kinds(batch)[kind]})" for batch in shown]
        table.add_row(f"  {kind}", *cells)
    for label, name in ROWS.items():
        cells = [number(batch, name) for batch in shown]
        if any(cell != "-" for cell in cells):
            table.add_row(label, *cells)
    return table


def _kinds(batch: EvaluationSet) -> Counter[str]:
    """How many tasks there are of each kind; none where the environment names no kinds."""
    return Counter(task.kind for task in batch.tasks if task.kind)
