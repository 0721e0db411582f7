"""What a model's metadata says about its layers. Knows GGUF keys, no tensors and no device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamagraph.errors import FormatError
from llamagraph.kernels.attention import AttentionShape

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20  # of a width or a count of heads
MAX_CONTEXT = (1 << 31) - 1  # positions are 32-bit


@dataclass(frozen=True)
class Rope:
    """A table of rotary frequencies: base, rotated numbers a head, and how they are scaled.

    `scale` multiplies the frequencies (1 / rope.scaling.factor). With YaRN a share `ext_factor` of
    them is kept, by a ramp between the dimensions that turn `beta_fast` and `beta_slow` times
    within `n_ctx_orig`.
    """

    base: float
    n_rot: int
    scale: float = 1.0
    ext_factor: float = 0.0  # 1 for YaRN, 0 for linear scaling alone
    n_ctx_orig: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attn_factor: float = 1.0

    def _yarn_dimension(self, turns: float) -> float:
        return self.n_rot * math.log(self.n_ctx_orig / (turns * 2 * math.pi)) / (
            2 * math.log(self.base)
        )

    def inv_freq(self, factors: np.ndarray | None = None) -> np.ndarray:
        """Radians a position for each pair, float32 (n_rot / 2,); `factors` divide them.

        YaRN: Peng et al., arXiv:2309.00071, section 3.2.
        """
        i = np.arange(self.n_rot // 2)
        freq = self.base ** (-2.0 * i / self.n_rot)
        if factors is not None:
            freq = freq / factors
        if self.ext_factor == 0:
            return (freq * self.scale).astype(np.float32)
        low = max(0, math.floor(self._yarn_dimension(self.beta_fast)))
        high = min(self.n_rot - 1, math.ceil(self._yarn_dimension(self.beta_slow)))
        ramp = self.ext_factor * (1 - np.clip((i - low) / max(0.001, high - low), 0, 1))
        return (freq * self.scale * (1 - ramp) + freq * ramp).astype(np.float32)

    @property
    def mscale(self) -> float:
        """What q and k are multiplied by, so that attention stays as sharp (arXiv:2309.00071)."""
        if self.ext_factor == 0:
            return self.attn_factor
        return self.attn_factor * (1 + 0.1 * math.log(1 / self.scale))


@dataclass(frozen=True)
class Config:
    """A model's numbers. Layer i: `layers[i]`, `n_ff[i]`, and `rope_of[i]`, a key of `ropes`."""

    n_ctx_train: int
    n_embd: int
    n_layer: int
    eps: float
    n_ff: tuple[int, ...]
    layers: tuple[AttentionShape, ...]
    ropes: Mapping[str, Rope]
    rope_of: tuple[str, ...]
    act: str = "silu"
    embd_scale: float = 1.0
    logit_softcap: float = 0.0
    norms: tuple[str, ...] = ()  # of a layer, beside attn_norm and ffn_norm: they must be there

    def shapes(self, n_vocab: int) -> dict[str, tuple[int, ...]]:
        """What each tensor's shape must be, as far as a file has it."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (n_vocab, self.n_embd),
            "output.weight": (n_vocab, self.n_embd),
            "output_norm.weight": (self.n_embd,),
        }
        for i, (s, n_ff) in enumerate(zip(self.layers, self.n_ff, strict=True)):
            q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
            matrices = {
                "attn_q": (q, self.n_embd), "attn_k": (kv, self.n_embd),
                "attn_v": (kv, self.n_embd), "attn_output": (self.n_embd, q),
                "ffn_gate": (n_ff, self.n_embd), "ffn_up": (n_ff, self.n_embd),
                "ffn_down": (self.n_embd, n_ff),
            }
            norms = dict.fromkeys(
                ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), self.n_embd
            ) | dict.fromkeys(("attn_q_norm", "attn_k_norm"), s.head_dim)
            for name, shape in matrices.items():
                shapes[f"blk.{i}.{name}.weight"] = shape
                shapes[f"blk.{i}.{name}.bias"] = shape[:1]
            shapes |= {f"blk.{i}.{name}.weight": (n,) for name, n in norms.items()}
        return shapes

    def check(self, source: Any, found: Mapping[str, tuple[int, ...]], n_vocab: int) -> None:
        """FormatError where a tensor's shape is not what the metadata says."""
        for name in self.norms:
            for i in range(self.n_layer):
                if f"blk.{i}.{name}.weight" not in found:
                    raise FormatError(f"{source}: tensor blk.{i}.{name}.weight is missing; "
                                      "is the file complete?")
        for name, shape in self.shapes(n_vocab).items():
            if found.get(name, shape) != shape:
                raise FormatError(f"{source}: tensor {name} is {_times(found[name])}, "
                                  f"the metadata says {_times(shape)}")


class Keys:
    """Looks up `<architecture>.<key>`, whole or a value a layer."""

    def __init__(self, metadata: Any):
        self.metadata = metadata
        self.arch = metadata.require("general.architecture", str)
        self.n_layer = self.positive("block_count", most=MAX_LAYERS)

    def number(self, key: str, kind: type, default: Any = ...) -> Any:
        return self.metadata.scalar(f"{self.arch}.{key}", kind, default)

    def positive(self, key: str, default: Any = ..., most: int = MAX_SIZE) -> int:
        value = self.number(key, int, default)
        if not 0 < value <= most:
            raise self.error(key, f"is {value}, which must be from 1 to {most}")
        return value

    def error(self, key: str, problem: str) -> FormatError:
        return FormatError(f"{self.metadata.path}: {self.arch}.{key} {problem}")

    def per_layer(self, key: str, default: int | None = None) -> list[int]:
        """A whole number for each layer: one for all of them, or an array."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(value) != self.n_layer:
                raise self.error(key, f"has {len(value)} values for {self.n_layer} layers")
            values = [int(v) for v in value]
        else:
            values = [self.number(key, int, default if default is not None else ...)] * self.n_layer
        for value in values:
            if not 0 < value <= MAX_SIZE:
                raise self.error(key, f"is {value} in a layer, which must be from 1 to {MAX_SIZE}")
        return values


def read_rope(keys: Keys, n_rot: int, base: float) -> Rope:
    """The table that the `rope.*` keys describe."""
    kind = keys.number("rope.scaling.type", str, "linear")
    factor = keys.number("rope.scaling.factor", float, None)
    if factor is None:
        factor = keys.number("rope.scale_linear", float, 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise keys.error("rope.scaling.type", f"is {kind!r}; there are none, linear, yarn")
    if n_rot <= 0 or n_rot % 2 or base <= 1 or factor < 0:
        raise keys.error("rope", f"has base {base}, {n_rot} dimensions, factor {factor}")
    scale = 1.0 if kind == "none" or factor == 0 else 1 / factor
    return Rope(
        base, n_rot, scale,
        keys.number("rope.scaling.yarn_ext_factor", float, float(kind == "yarn" and scale != 1.0)),
        keys.number("rope.scaling.original_context_length", int, 0)
        or keys.positive("context_length", most=MAX_CONTEXT),
        keys.number("rope.scaling.yarn_beta_fast", float, 32.0),
        keys.number("rope.scaling.yarn_beta_slow", float, 1.0),
        keys.number("rope.scaling.attn_factor", float, 1.0),
    )


def read_config(metadata: Any, *, neox: bool, act: str = "silu") -> Config:
    """What every llama-like architecture has: RMS norms, grouped heads, a gated block, rope."""
    keys = Keys(metadata)
    if keys.number("expert_count", int, 0):
        raise keys.error("expert_count", "is not 0; mixtures of experts are not supported")
    n_embd = keys.positive("embedding_length")
    n_head = keys.per_layer("attention.head_count")
    n_head_kv = keys.per_layer("attention.head_count_kv") if (
        f"{keys.arch}.attention.head_count_kv" in metadata
    ) else n_head
    head_dim = keys.positive("attention.key_length", n_embd // n_head[0])
    if (value_dim := keys.positive("attention.value_length", head_dim)) != head_dim:
        raise keys.error("attention.value_length", f"is {value_dim}, the keys have {head_dim}")
    rope = read_rope(keys, keys.positive("rope.dimension_count", head_dim, most=head_dim),
                     keys.number("rope.freq_base", float, 10000.0))
    if (eps := keys.number("attention.layer_norm_rms_epsilon", float)) < 0:
        raise keys.error("attention.layer_norm_rms_epsilon", f"is {eps}, below 0")
    scale = keys.number("attention.scale", float, 1 / math.sqrt(head_dim))
    layers = tuple(
        AttentionShape(h, kv, head_dim, scale, neox, rope.mscale)
        for h, kv in zip(n_head, n_head_kv, strict=True)
    )
    if bad := [s for s in layers if s.n_head % s.n_head_kv]:
        raise keys.error("attention.head_count_kv",
                         f"is {bad[0].n_head_kv}, which does not divide {bad[0].n_head} heads")
    return Config(
        n_ctx_train=keys.positive("context_length", most=MAX_CONTEXT),
        n_embd=n_embd,
        n_layer=keys.n_layer,
        eps=eps,
        n_ff=tuple(keys.per_layer("feed_forward_length")),
        layers=layers,
        ropes={"full": rope},
        rope_of=("full",) * keys.n_layer,
        act=act,
    )


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
