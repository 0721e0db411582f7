"""Qwen3: as llama, with a norm on each head of q and k; rope rotates halves."""

from typing import Any

from llamagraph.models.config import Config, read_config
from llamagraph.models.llama import step

__all__ = ["config", "step"]


def config(metadata: Any) -> Config:
    return read_config(metadata, neox=True)
