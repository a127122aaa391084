"""Programming problems: stdin/stdout programs, hidden tests, generated unit tests as the reward model."""

from rla_lightning.environments.coding.environment import CodingEnvironment
from rla_lightning.environments.coding.pipelines import PipelineEnvironment

__all__ = ["CodingEnvironment", "PipelineEnvironment"]
