"""What is measured where programs are written: generated unit tests, and how often problems are solved.

In the manner of `metrics.py`: sums across batches and processes, NaN where there is no data to define a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from rla_lightning.algorithm.unit_tests import pass_at_k, unit_test_quality
from rla_lightning.rollout.unit_tests import test_results
from rla_lightning.types import RolloutGroup


class UnitTestMetrics(Metric):
    """How good the reward model's unit tests are (paper, table 1).

    ut is the share of written tests that all correct programs pass, of tasks that have one; detect the share that every wrong
    program fails besides, of tasks that have both. A test that cannot be parsed is neither. discrimination is the mean share
    of wrong programs that a test rejects, over tests that all correct programs pass. Answers without a program count as
    neither correct nor wrong.
    """

    full_state_update = False
    rated: Tensor  # [kinds + 1] tests of tasks with a correct program; the last is for all kinds
    accurate: Tensor  # [kinds + 1]
    opposed: Tensor  # [kinds + 1] tests of tasks with a correct and a wrong program
    detecting: Tensor  # [kinds + 1]
    written: Tensor
    readable: Tensor
    discriminating: Tensor
    discrimination: Tensor

    def __init__(self, kinds: Sequence[str], **kwargs: Any) -> None:
        """Args:
        kinds: of all tasks, so that every process has the same numbers, whatever its share.
        kwargs: of torchmetrics.
        """
        super().__init__(**kwargs)
        self.kinds = tuple(kinds)
        for name in ("rated", "accurate", "opposed", "detecting"):
            self.add_state(name, default=torch.zeros(len(self.kinds) + 1, dtype=torch.long), dist_reduce_fx="sum")
        for name in ("written", "readable", "discriminating"):
            self.add_state(name, default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("discrimination", default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, groups: Sequence[RolloutGroup]) -> None:
        counts = torch.zeros(4, len(self.kinds) + 1, dtype=torch.long)  # rated, accurate, opposed, detecting
        written = readable = discriminating = 0
        discrimination = 0.0
        for group in groups:
            written += len(group.tests)
            readable += sum(test.test is not None for test in group.tests)
            if not group.tests:
                continue
            passed, is_correct = test_results(group)
            if not any(is_correct):
                continue
            quality = unit_test_quality(passed, is_correct)
            accurate, rejected = quality.accuracy == 1.0, quality.detection
            row = [len(group.tests), int(accurate.sum()), 0, 0]
            if not all(is_correct):
                row[2:] = [len(group.tests), int((accurate & (rejected == 1.0)).sum())]
                told = accurate & ~np.isnan(rejected)  # NaN where no wrong program could be run: it would never leave the sum
                discriminating += int(told.sum())
                discrimination += float(rejected[told].sum())
            places = [-1, self.kinds.index(group.task.kind)] if group.task.kind in self.kinds else [-1]
            counts[:, places] += torch.tensor(row)[:, None]
        counts = counts.to(self.rated.device)
        self.rated, self.accurate = self.rated + counts[0], self.accurate + counts[1]
        self.opposed, self.detecting = self.opposed + counts[2], self.detecting + counts[3]
        self.written, self.readable = self.written + written, self.readable + readable
        self.discriminating = self.discriminating + discriminating
        self.discrimination = self.discrimination + discrimination

    def compute(self) -> dict[str, Tensor]:
        ut, detect = self.accurate / self.rated, self.detecting / self.opposed
        named = {"ut": ut[-1], "detect": detect[-1], "discrimination": self.discrimination / self.discriminating}
        for index, kind in enumerate(self.kinds):
            named |= {f"ut/{kind}": ut[index], f"detect/{kind}": detect[index]}
        return {**named, "readable_rate": self.readable / self.written}


class PassMetrics(Metric):
    """pass@k (unbiased, mean over tasks with at least k rollouts) and the share of hidden tests that programs pass."""

    full_state_update = False
    tasks: Tensor  # [ks]
    solved: Tensor  # [ks]
    rollouts: Tensor
    partial: Tensor

    def __init__(self, samples: int, ks: Sequence[int], **kwargs: Any) -> None:
        """Args:
        samples: rollouts of each task; larger k are left out.
        ks: values of k.
        kwargs: of torchmetrics.
        """
        super().__init__(**kwargs)
        self.ks = tuple(k for k in ks if k <= samples)
        self.add_state("tasks", default=torch.zeros(len(self.ks), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("solved", default=torch.zeros(len(self.ks)), dist_reduce_fx="sum")
        self.add_state("rollouts", default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("partial", default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, groups: Sequence[RolloutGroup]) -> None:
        tasks, solved = torch.zeros(len(self.ks), dtype=torch.long), torch.zeros(len(self.ks))
        for group in groups:
            for index, k in enumerate(self.ks):
                if group.rollouts >= k:
                    tasks[index] += 1
                    solved[index] += pass_at_k(group.rollouts, group.successes, k)
        device = self.tasks.device
        self.tasks, self.solved = self.tasks + tasks.to(device), self.solved + solved.to(device)
        rates = [trajectory.partial for group in groups for trajectory in group.valid_trajectories]
        self.rollouts, self.partial = self.rollouts + len(rates), self.partial + sum(rates)

    def compute(self) -> dict[str, Tensor]:
        rates = self.solved / self.tasks
        return {**{f"pass@{k}": rates[index] for index, k in enumerate(self.ks)}, "pass_ratio": self.partial / self.rollouts}
