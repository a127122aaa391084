"""Lightning callbacks that people plug in by class_path; rla_lightning never imports them."""

from callbacks.progress import LoopProgress
from callbacks.proposal_study import ProposalStudy
from callbacks.summary import RunSummary
from callbacks.trajectory_log import TrajectoryLog
from callbacks.warm_start import WarmStart

__all__ = ["LoopProgress", "ProposalStudy", "RunSummary", "TrajectoryLog", "WarmStart"]
