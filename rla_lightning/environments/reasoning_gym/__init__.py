"""Procedural reasoning questions of the package reasoning-gym, one answer each."""

from rla_lightning.environments.reasoning_gym.environment import ReasoningGymEnvironment

__all__ = ["ReasoningGymEnvironment"]
