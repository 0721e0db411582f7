"""Writes GGUF files for tests: a writer that checks nothing, so that it can also write what must be
refused, and a tiny llama model. Shares the table of tensor types with the package, but no code.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType

from llamagraph.errors import FormatError
from llamagraph.gguf import QUANTS, GGUFFile

# gguf_metadata_value_type: struct code of the numbers
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DTYPES = {np.dtype(code if code != "?" else "bool"): kind for kind, code in CODES.items()}
U32, STRING, ARRAY = 4, 8, 9


@dataclass(frozen=True)
class Typed:
    """A metadata value with the type that it is to be written in."""

    kind: int
    value: Any


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: shape rows first, and the bytes in `quant`'s layout."""

    name: str
    shape: tuple[int, ...]
    quant: str
    raw: bytes


def quantised(name: str, weights: np.ndarray, quant: str) -> Tensor:
    """A tensor of float weights, in a type that `gguf.quants` can write."""
    raw = quants.quantize(weights.astype(np.float32), GGMLQuantizationType[quant]).tobytes()
    return Tensor(name, weights.shape, quant, raw)


def text_bytes(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    """Type and value: whole numbers as uint32 (int64 where they do not fit), reals as float32."""
    match value:
        case Typed(kind=kind, value=number):
            return struct.pack("<I" + CODES[kind], kind, number)
        case bool():
            return value_bytes(Typed(7, value))
        case int():
            return value_bytes(Typed(4 if 0 <= value < 1 << 32 else 11, value))
        case float():
            return value_bytes(Typed(6, value))
        case str() | bytes():
            return struct.pack("<I", STRING) + text_bytes(value)
        case np.ndarray():
            head = struct.pack("<IIQ", ARRAY, DTYPES[value.dtype], len(value))
            return head + value.tobytes()
        case _:
            head = struct.pack("<IIQ", ARRAY, STRING, len(value))
            return head + b"".join(map(text_bytes, value))


def padding(n_bytes: int, alignment: int) -> bytes:
    return bytes(-n_bytes % alignment)


def gguf_bytes(
    pairs: Mapping[str, Any], tensors: Sequence[Tensor] = (), version: int = 3, alignment: int = 32
) -> bytes:
    """A whole GGUF file; `alignment` is what is done, `general.alignment` is up to `pairs`."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(text_bytes(key) + value_bytes(value) for key, value in pairs.items())
    data = b""
    for t in tensors:
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape[::-1])
        head += text_bytes(t.name) + dims + struct.pack("<IQ", QUANTS[t.quant].id, len(data))
        data += t.raw + padding(len(t.raw), alignment)
    return head + padding(len(head), alignment) + data


def tiny_llama(seed: int = 0) -> bytes:
    """A llama model with random weights: 2 layers, 64 wide, a byte vocabulary of 300 tokens."""
    rng = np.random.default_rng(seed)
    n_embd, n_ff, n_kv, n_vocab = 64, 96, 32, 300
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [f"▁w{i}" for i in range(n_vocab - len(tokens))]
    kinds = np.array([2, 3, 3] + [6] * 256 + [1] * (n_vocab - 259), np.int32)
    pairs = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": n_vocab,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(n_vocab, np.float32),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }

    def matrix(name: str, rows: int, cols: int, quant: str = "Q8_0") -> Tensor:
        return quantised(name, rng.standard_normal((rows, cols)) / cols**0.5, quant)

    def norm(name: str) -> Tensor:
        return quantised(name, 1 + 0.1 * rng.standard_normal(n_embd), "F32")

    tensors = [matrix("token_embd.weight", n_vocab, n_embd)]
    for i in range(2):
        tensors += [
            norm(f"blk.{i}.attn_norm.weight"),
            matrix(f"blk.{i}.attn_q.weight", n_embd, n_embd),
            matrix(f"blk.{i}.attn_k.weight", n_kv, n_embd),
            matrix(f"blk.{i}.attn_v.weight", n_kv, n_embd, "F16"),
            matrix(f"blk.{i}.attn_output.weight", n_embd, n_embd),
            norm(f"blk.{i}.ffn_norm.weight"),
            matrix(f"blk.{i}.ffn_gate.weight", n_ff, n_embd, "Q4_0"),
            matrix(f"blk.{i}.ffn_up.weight", n_ff, n_embd, "Q4_0"),
            matrix(f"blk.{i}.ffn_down.weight", n_embd, n_ff, "Q4_1"),
        ]
    return gguf_bytes(pairs, [*tensors, norm("output_norm.weight")])


def write(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def refusal(path: Path) -> str:
    """The one line that opening `path` fails with, without the file's name."""
    with pytest.raises(FormatError) as caught:
        GGUFFile(path)
    line = str(caught.value)
    assert line.isprintable() and line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")
