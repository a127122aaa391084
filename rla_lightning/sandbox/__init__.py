"""Runs untrusted Python programs away from everything; see README.md for what holds them."""

from rla_lightning.sandbox.pool import Run, RunResult, RunStatus, Sandbox, SandboxSettings

__all__ = ["Run", "RunResult", "RunStatus", "Sandbox", "SandboxSettings"]
