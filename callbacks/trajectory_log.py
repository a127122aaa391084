"""Writes what happened: trajectories/epoch=NNN.jsonl and tasks.jsonl in the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
from transformers import PreTrainedTokenizerBase

from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.module import ClosedLoop
from rla_lightning.types import ConfigError, IterationResult, Judgment, Step


class TrajectoryLog(L.Callback):
    """One line per rollout with every step, vote, reward and advantage; one line per task ever proposed.

    Args:
        every_n_epochs: epochs between two files of trajectories.
        max_groups: tasks per file, at equal distances in the iteration (proposals come last); null writes all.
    """

    def __init__(self, every_n_epochs: int = 5, max_groups: int | None = 4) -> None:
        if every_n_epochs < 1:
            raise ConfigError(f"every_n_epochs must be at least 1, got {every_n_epochs}")
        self.every_n_epochs, self.max_groups = every_n_epochs, max_groups

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        folder = trainer.log_dir
        if not trainer.is_global_zero or folder is None or trainer.current_epoch % self.every_n_epochs:
            return
        assert isinstance(pl_module, ClosedLoop)
        path = Path(folder) / "trajectories" / f"epoch={trainer.current_epoch:03d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = trajectory_rows(
            outputs["result"], self.max_groups, pl_module.players.policy.tokenizer, pl_module.players.reward_model.tokenizer
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Not at the end of an epoch: callbacks come before the module there, which adapts the tasks."""
        self._write_tasks(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write_tasks(trainer)

    def _write_tasks(self, trainer: L.Trainer) -> None:
        """Rewrites tasks.jsonl from the pool, which holds the whole history."""
        folder = trainer.log_dir
        if not trainer.is_global_zero or folder is None:
            return
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(datamodule, EnvironmentDataModule)
        lines = "".join(json.dumps(row) + "\n" for row in datamodule.pool.history())
        (Path(folder) / "tasks.jsonl").write_text(lines)


def trajectory_rows(
    result: IterationResult,
    max_groups: int | None,
    tokenizer: PreTrainedTokenizerBase,
    judge_tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """JSON rows of the rollouts of an iteration."""
    rows = []
    number = len(result.groups)
    stride = 1 if max_groups is None else max(1, -(-number // max_groups))
    for index in range(0, number, stride):
        group = result.groups[index]
        for g, trajectory in enumerate(group.trajectories):
            unknown = (None,) * len(trajectory.steps)  # no credit where the environment failed
            votes = group.judgments[g] if group.judgments else ((),) * len(trajectory.steps)
            credit = zip(
                result.rewards[index][g] or unknown, result.advantages[index][g] or unknown, result.values[index][g], strict=True
            )
            rows.append(
                {
                    "iteration": result.iteration,
                    "task_id": trajectory.task.id,
                    "rollout": g,
                    "outcome": trajectory.outcome,
                    "stop_reason": trajectory.stop_reason,
                    "error": trajectory.error,
                    "steps": [
                        _step_row(step, step_votes, tokenizer, judge_tokenizer)
                        | {"reward": reward, "advantage": advantage, "value": value}
                        for step, step_votes, (reward, advantage, value) in zip(trajectory.steps, votes, credit, strict=True)
                    ],
                }
            )
    return rows


def _step_row(
    step: Step, votes: tuple[Judgment, ...], tokenizer: PreTrainedTokenizerBase, judge_tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": tokenizer.decode(list(step.prompt_ids))},
            {"role": "assistant", "content": step.completion.text},
        ],
        "token_ids": [*step.prompt_ids, *step.completion.token_ids],
        "loss_mask": [0] * len(step.prompt_ids) + [1] * len(step.completion.token_ids),
        "logprobs": list(step.completion.logprobs),
        "observation": step.observation.text,
        "action": step.action,
        "is_valid": step.is_valid,
        "feedback": step.feedback,
        "checks": list(step.checks),
        "scores": [vote.score for vote in votes],
        "critiques": [vote.completion.text for vote in votes],
        "judge_prompt": judge_tokenizer.decode(list(votes[0].prompt_ids)) if votes else "",
    }
