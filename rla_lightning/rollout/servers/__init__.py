"""Samplers whose model is served by another process: vLLM for models in training, any OpenAI-compatible server for others."""

from rla_lightning.rollout.servers.openai import OpenAIServer
from rla_lightning.rollout.servers.vllm import VllmServer

__all__ = ["OpenAIServer", "VllmServer"]
