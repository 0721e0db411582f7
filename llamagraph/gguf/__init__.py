"""GGUF files: reading them, their tensor types, and where models come from."""

from llamagraph.gguf.check import check_tensors
from llamagraph.gguf.hub import cache_folder, default_model, hf_model
from llamagraph.gguf.quants import QUANTS, QUANTS_BY_ID, Quant
from llamagraph.gguf.reader import GGUFFile, Metadata, TensorInfo

__all__ = [
    "QUANTS",
    "QUANTS_BY_ID",
    "GGUFFile",
    "Metadata",
    "Quant",
    "TensorInfo",
    "cache_folder",
    "check_tensors",
    "default_model",
    "hf_model",
]
