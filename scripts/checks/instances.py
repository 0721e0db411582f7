"""Which kernel instances there are: those of the examples, and those that usual models need.

An instance is a kernel with its constants. Needs no GPU and no file: models are planned from their
numbers, two layers each, for every step that the runner can ask for.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from checks.examples import examples
from llamagraph import models
from llamagraph.gguf.quants import QUANTS, Quant
from llamagraph.gguf.reader import GGUFFile, Metadata
from llamagraph.kernels import all_kernels
from llamagraph.kernels.attention import attention_class
from llamagraph.planner import ROW_BUCKETS, SHIFT, Planner
from llamagraph.program.launch import Kernel, Launch, StepKey
from llamagraph.program.target import Target

Sources = Mapping[str, tuple[str, tuple[int, ...]]]  # type and shape of each tensor
N_CTX = 4096


class Shape(NamedTuple):
    """A model's numbers. `types`: of most matrices, of the larger ones, of embedding and output."""

    name: str
    architecture: str
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    tied: bool
    types: tuple[str, str, str]


SHAPES = (
    Shape("135M Q4_1", "llama", 576, 1536, 9, 3, 64, 49152, True, ("Q4_1", "Q4_1", "Q6_K")),
    Shape("135M Q8_0", "llama", 576, 1536, 9, 3, 64, 49152, True, ("Q8_0", "Q8_0", "Q8_0")),
    Shape("0.5B Q5_0", "qwen2", 896, 4864, 14, 2, 64, 151936, True, ("Q5_0", "Q8_0", "Q8_0")),
    Shape("0.6B Q4_K", "qwen3", 1024, 3072, 16, 8, 128, 151936, True, ("Q4_K", "Q6_K", "Q6_K")),
    Shape("270M Q5_0", "gemma3", 640, 2048, 4, 1, 256, 262144, True, ("Q5_0", "Q8_0", "Q8_0")),
    Shape("1B Q4_K", "llama", 2048, 8192, 32, 8, 64, 128256, True, ("Q4_K", "Q6_K", "Q6_K")),
    Shape("1B F16", "llama", 2048, 8192, 32, 8, 64, 128256, True, ("F16", "F16", "F16")),
    Shape("8B Q4_K", "llama", 4096, 14336, 32, 8, 128, 128256, False, ("Q4_K", "Q6_K", "Q6_K")),
    Shape("8B Q4_0", "llama", 4096, 14336, 32, 8, 128, 128256, False, ("Q4_0", "Q4_0", "Q6_K")),
    Shape("8B Q8_0", "llama", 4096, 14336, 32, 8, 128, 128256, False, ("Q8_0", "Q8_0", "Q8_0")),
)
class Info(NamedTuple):
    """What planning asks of a tensor."""

    shape: tuple[int, ...]
    quant: Quant


class Described(NamedTuple):
    """What planning asks of a file."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, Info]


LARGER = ("attn_v", "ffn_down")  # what Q4_K_M stores with more bits in every third layer
OPTIONAL = {  # tensors that only some architectures have
    "attn_q.bias": ("qwen2",), "attn_k.bias": ("qwen2",), "attn_v.bias": ("qwen2",),
    "attn_q_norm.weight": ("qwen3", "gemma3"), "attn_k_norm.weight": ("qwen3", "gemma3"),
    "post_attention_norm.weight": ("gemma3",), "post_ffw_norm.weight": ("gemma3",),
}


def metadata_of(s: Shape) -> Metadata:
    keys = {
        "block_count": 2, "context_length": 131072, "embedding_length": s.n_embd,
        "feed_forward_length": s.n_ff, "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv, "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 512,
    }
    named = {f"{s.architecture}.{key}": value for key, value in keys.items()}
    return Metadata(Path(s.name), {"general.architecture": s.architecture, **named})


def sources_of(s: Shape) -> Sources:
    """The tensors of two layers, one with the larger types and one without."""
    config = models.load(metadata_of(s)).config(metadata_of(s))
    usual, larger, outer = s.types
    found = {}
    for name, shape in config.shapes(s.n_vocab).items():
        part = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if part.endswith(".bias") and part not in OPTIONAL:
            continue
        if s.architecture not in OPTIONAL.get(part, (s.architecture,)):
            continue
        if s.tied and name == "output.weight":
            continue
        more = name.startswith("blk.0.") and part.split(".")[0] in LARGER
        kind = (larger if more else usual) if name.startswith("blk.") else outer
        found[name] = ("F32" if len(shape) == 1 else kind, shape)
    return found


def described(s: Shape) -> Described:
    tensors = {name: Info(shape, QUANTS[dtype]) for name, (dtype, shape) in sources_of(s).items()}
    return Described(Path(s.name), metadata_of(s), tensors)


def keys() -> Iterator[StepKey]:
    """Every step that the runner can ask for, and a shift."""
    yield SHIFT
    for rows in ROW_BUCKETS:
        for depth in dict.fromkeys(attention_class(kv_len, rows) for kv_len in (rows, N_CTX)):
            yield StepKey(rows, "none", depth)
            yield StepKey(rows, "all", depth)
            for sampler in ("greedy", "chain", "host"):
                yield StepKey(rows, "last", depth, sampler)


def planned(target: Target, file: Any) -> Iterator[Launch]:
    """The launches of all steps of a model."""
    planner = Planner(file, target, N_CTX)
    for key in keys():
        yield from planner.plan(key).launches


def instances(target: Target, files: list[Path]) -> dict[Kernel, int]:
    """Each instance with the most dynamic shared memory that a launch of it asks for, in bytes.

    An example may be for a larger GPU: what no block of this one could hold is no instance of it.
    """
    kernels = [k for k in all_kernels().values() if k.arch in ("", target.name)]
    launches = [e.launch(target) for k in kernels for e in examples(k)]
    launches = [x for x in launches if x.geometry.shared <= target.shared_per_block]
    for shape in SHAPES:
        launches += planned(target, described(shape))
    for path in files:
        with GGUFFile(path) as file:
            launches += planned(target, file)
    found: dict[Kernel, int] = {}
    for launch in launches:
        if launch.kernel.source:  # a copy is the driver's own
            found[launch.kernel] = max(found.get(launch.kernel, 0), launch.geometry.shared)
    return found
