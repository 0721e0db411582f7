"""Writes LoRA adapters for tests, and merges them into a plain model's weights in float64."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import Tensor, gguf_bytes, quantised
from plain_forward import PlainModel

EMBEDDING = "token_embd.weight"


def pairs_of(model: Path, targets: Sequence[str], rank: int, quant: str = "F32", seed: int = 0
             ) -> list[Tensor]:
    """Random pairs for the model's tensors whose names end in one of `targets`."""
    rng, found = np.random.default_rng(seed), []
    for tensor in gguf.GGUFReader(model).tensors:
        if not tensor.name.endswith(tuple(targets)):
            continue
        n_in, n_out = (int(n) for n in tensor.shape)
        a, b = ((n_out, rank), (n_in, rank)) if tensor.name == EMBEDDING else (
            (rank, n_in), (n_out, rank))
        for half, shape in ((".lora_a", a), (".lora_b", b)):
            weights = rng.standard_normal(shape) / np.sqrt(shape[1])
            kind = quant if shape[1] % gguf.GGML_QUANT_SIZES[
                gguf.GGMLQuantizationType[quant]][0] == 0 else "F16"
            found.append(quantised(tensor.name + half, weights, kind))
    assert found, targets
    return found


def keys(alpha: Any = 16.0, arch: Any = "llama", **more: Any) -> dict[str, Any]:
    return {"general.type": "adapter", "general.architecture": arch, "adapter.type": "lora",
            "adapter.lora.alpha": alpha, **more}


def write_adapter(path: Path, model: Path, targets: Sequence[str], rank: int = 8,
                  alpha: float = 16.0, quant: str = "F32", seed: int = 0) -> Path:
    arch = gguf.GGUFReader(model).fields["general.architecture"].contents()
    path.write_bytes(gguf_bytes(keys(alpha, arch),
                                pairs_of(model, targets, rank, quant, seed)))
    return path


def merged(model: Path, adapters: Mapping[Path, float]) -> PlainModel:
    """The model with W + scale * alpha / rank * B A for each pair; of embeddings, rows alone."""
    plain = PlainModel(model)
    plain.w.setdefault("output.weight", plain.w[EMBEDDING])
    for path, scale in adapters.items():
        reader = gguf.GGUFReader(path)
        alpha = reader.fields["adapter.lora.alpha"].contents()
        w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])
             .astype(np.float64) for t in reader.tensors}
        for name in (n.removesuffix(".lora_a") for n in w if n.endswith(".lora_a")):
            a, b = w[f"{name}.lora_a"], w[f"{name}.lora_b"]
            product = a @ b.T if name == EMBEDDING else b @ a
            plain.w[name] = plain.w[name] + scale * (alpha / b.shape[1] or 1.0) * product
    return plain
