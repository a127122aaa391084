"""AlfWorld: its game files or locally built ones, an exact fast simulator, and TextWorld itself."""

from rla_lightning.environments.alfworld.environment import AlfWorldEnvironment

__all__ = ["AlfWorldEnvironment"]
