"""Qwen2 and Qwen2.5: as llama, with biases on q, k, v; rope rotates halves."""

from typing import Any

from llamagraph.models.config import Config, read_config
from llamagraph.models.llama import step

__all__ = ["config", "step"]


def config(metadata: Any) -> Config:
    return read_config(metadata, neox=True)
