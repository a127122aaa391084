"""An AlfWorld-like household in pure Python."""

from rla_lightning.environments.household.environment import HouseholdEnvironment

__all__ = ["HouseholdEnvironment"]
