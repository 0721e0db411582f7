"""Qwen3: as llama, with a norm on each head of q and k; rope rotates halves."""

from dataclasses import replace
from typing import Any

from llamagraph.models.config import Config, read_config
from llamagraph.models.llama import step

__all__ = ["config", "step"]


def config(metadata: Any) -> Config:
    return replace(read_config(metadata, neox=True), norms=("attn_q_norm", "attn_k_norm"))
