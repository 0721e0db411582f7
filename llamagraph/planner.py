"""Plans a model's steps for a target, from what its file says of itself; no weight is read.

The one description of where weights, KV and io lie: the runner loads into it and runs its programs,
inspecting prints them. Knows no device, and no tensor's bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from llamagraph import models
from llamagraph.adapters import Adapters
from llamagraph.errors import FormatError, LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import attention_class
from llamagraph.kernels.kv import BLOCK, TYPES, fits
from llamagraph.kernels.layouts import layout, stored_bytes
from llamagraph.kernels.shift import shift
from llamagraph.kernels.step import step_io
from llamagraph.kvcache import KVCache
from llamagraph.models.config import MAX_CONTEXT
from llamagraph.program.launch import Buffer, Program, StepKey
from llamagraph.program.plan import ALIGNMENT
from llamagraph.program.tape import Tape
from llamagraph.program.target import Target
from llamagraph.program.weights import Weights

ROW_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LOGIT_ROWS = 32  # at most, where all rows' logits are wanted: they fill the scratch
FACTORS = "rope_freqs.weight"  # no weight by itself: it goes into the rope tables
SHIFT = StepKey(logits="none", shift=True)
LARGEST = (  # the steps that need most scratch; a missing tensor shows while they are planned
    StepKey(LOGIT_ROWS, "all", "long"), StepKey(ROW_BUCKETS[-1], "last"),
    StepKey(1, "last", "long", "chain"), SHIFT,
)


def row_bucket(n: int) -> int:
    """The smallest bucket that holds n rows."""
    return next(b for b in ROW_BUCKETS if b >= n)


def step_key(n_rows: int, kv_len: int, logits: str, sampler: str, loop: bool = False) -> StepKey:
    """The program of a step of `n_rows` rows, with `kv_len` positions when it is done.

    In a `loop` a decode step repeats itself, unless its token is chosen on the host.
    """
    depth = attention_class(kv_len, row_bucket(n_rows))
    repeats = loop and n_rows == 1 and logits == "last" and sampler != "host"
    return StepKey(row_bucket(n_rows), logits, depth, sampler, repeats=repeats)


def prompt_steps(n_tokens: int, most: int = ROW_BUCKETS[-1]) -> Iterator[tuple[int, str]]:
    """Rows, at most so many, and wanted logits of the steps that read a prompt.

    The largest program is not for what fills at most three quarters of it: half of its rows and the
    rest are read in less time (measured on an H200: up to 14 % less).
    """
    half = ROW_BUCKETS[-1] // 2
    while n_tokens:
        rows = half if half < n_tokens <= half * 3 // 2 else n_tokens
        rows = min(rows, most)
        n_tokens -= rows
        yield rows, "none" if n_tokens else "last"


def usual_keys(n_prompt: int, sampler: str, most: int = ROW_BUCKETS[-1],
               loop_to: int | None = None) -> list[StepKey]:
    """The programs of a prompt at the start of a sequence, and of the decode step behind it.

    In a loop that step repeats itself until there are `loop_to` positions.
    """
    keys, n_past, loop = [], 0, loop_to is not None
    for n_rows, logits in prompt_steps(n_prompt, most):
        n_past += n_rows
        keys.append(step_key(n_rows, n_past, logits, sampler, loop))
    return list(dict.fromkeys([*keys, step_key(1, loop_to or n_past + 1, "last", sampler, loop)]))


def keys_of_rows(rows: Iterable[int], sampler: str, loop: bool = False) -> list[StepKey]:
    """The programs of steps of so many rows at the start of a sequence.

    LlamaGraphError where no step has so many.
    """
    keys = []
    for n in rows:
        if not 1 <= n <= ROW_BUCKETS[-1]:
            raise LlamaGraphError(f"--graph-prepare {n}: a step has 1 to {ROW_BUCKETS[-1]} rows")
        if n in (ROW_BUCKETS[-1], ROW_BUCKETS[-1] // 2):  # more of a prompt may follow these
            keys.append(step_key(n, n, "none", sampler))
        keys.append(step_key(n, n, "last", sampler, loop))
    return list(dict.fromkeys(keys))


class Planner:
    """A model's config, and its buffers on a target: `weights`, `io` and `kv` for `n_ctx` tokens.

    `buffers` are the weights by name: the file's tensors and the rope tables, `weights_bytes` long.
    `type_k` and `type_v` are the types of the KV cache, by llama.cpp's names; None is f16 on a GPU
    and f32 elsewhere. A key's `adapters` are names of the `adapters` that are applied.
    Raises FormatError where the tensors are not what the metadata says.
    """

    def __init__(self, file: GGUFFile, target: Target, n_ctx: int | None = None,
                 type_k: str | None = None, type_v: str | None = None,
                 adapters: Adapters | None = None):
        self.adapters = adapters or Adapters((), file)
        architecture = models.load(file.metadata)
        self._step, self.config = architecture.step, architecture.config(file.metadata)
        self.target, self.n_ctx = target, n_ctx or self.config.n_ctx_train
        if not 0 < self.n_ctx <= MAX_CONTEXT:
            raise LlamaGraphError(f"-c {self.n_ctx}: a context has 1 to {MAX_CONTEXT} tokens")
        types = self._kv_type("-ctk", type_k), self._kv_type("-ctv", type_v)
        self.kv = KVCache(self.config.layers, self.n_ctx, ROW_BUCKETS[-1], types)
        self.n_vocab = self._check_shapes(file)
        self.io = step_io(self.n_ctx, self.n_vocab, len(self.adapters))
        self.buffers: dict[str, Buffer] = {}
        self.weights_bytes = 0
        for name, (dtype, shape) in self._stored(file).items():
            try:
                self._place(name, dtype, shape)
            except LlamaGraphError as error:
                raise LlamaGraphError(f"{file.path}: {name}: {error}") from None
        for name, stored in self.adapters.stored.items():
            self._place(name, stored.dtype, stored.shape, stored.multiplies_rows)
        self.weights = Weights(self.buffers, str(file.path))

    def _kv_type(self, option: str, name: str | None) -> str:
        """The type of that name, which the heads of every layer must fit."""
        dtype = TYPES.get(name or ("f16" if self.target.is_cuda else "f32"))
        if dtype is None:
            raise LlamaGraphError(f"{option} {name}: the KV cache can be {', '.join(TYPES)}")
        if bad := [x.head_dim for x in self.config.layers if not fits(dtype, x.head_dim)]:
            raise LlamaGraphError(f"{option} {name}: heads of {bad[0]} numbers are no whole blocks "
                                  f"of {BLOCK}; use f16 or bf16")
        return dtype

    def _check_shapes(self, file: GGUFFile) -> int:
        """The tensors against the metadata, before anything is allocated; the vocabulary's size."""
        found = {name: tuple(t.shape) for name, t in file.tensors.items()}
        n_vocab = len(file.metadata.scalar("tokenizer.ggml.tokens", list, ()))
        n_vocab = n_vocab or found.get("token_embd.weight", (0,))[0]
        self.config.check(file.path, found, n_vocab)
        for rope in self.config.ropes.values():
            if found.get(FACTORS, (rope.n_rot // 2,)) != (rope.n_rot // 2,):
                raise FormatError(f"{file.path}: tensor {FACTORS} has {found[FACTORS][0]} values "
                                  f"for {rope.n_rot // 2} rotated pairs")
        return n_vocab

    def _stored(self, file: GGUFFile) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of every weight; vectors (norms, biases) are F32 whatever the file has."""
        tensors = {name: ("F32" if len(t.shape) == 1 else t.quant.name, tuple(t.shape))
                   for name, t in file.tensors.items() if name != FACTORS}
        return tensors | {f"rope.{name}.weight": ("F32", (rope.n_rot // 2,))
                          for name, rope in self.config.ropes.items()}

    def _place(self, name: str, dtype: str, shape: tuple[int, ...], halves: bool = False) -> None:
        """Gives a weight its place; with `halves` a GPU has F16 of it instead of F32."""
        start, order = self.weights_bytes, layout(self.target, dtype, shape)
        if halves and dtype == "F32" and order:
            order = f"f16.{order}"
        stop = start + stored_bytes(dtype, shape, order)
        self.buffers[name] = Buffer(name, "weights", start, stop, dtype, shape, order)
        self.weights_bytes = -(-stop // ALIGNMENT) * ALIGNMENT

    def plan(self, key: StepKey) -> Program:
        """The launches of a step, or of a shift."""
        tape = Tape(self.target, key, self.io)
        if key.shift:
            self._shift(tape)
        else:
            changes = self.adapters.changes(key, self.buffers, self.io["lora_scales"])
            self._step(tape, self.weights.adapted(changes), self.kv.layers, self.config)
        return tape.program()

    def _shift(self, tape: Tape) -> None:
        for i, (shape, rope) in enumerate(
                zip(self.config.layers, self.config.rope_of, strict=True)):
            with tape.scope(f"blk.{i}"):
                inv_freq = getattr(self.weights.rope, rope).weight
                shift(tape, self.kv.layers[i], shape, inv_freq, self.n_ctx)

    def scratch_bytes(self) -> int:
        """What the largest step needs; twice as much where some of several adapters, which are
        not tried here, may be placed less tightly than all of them."""
        needed = max(self.plan(replace(key, adapters=names)).scratch_bytes
                     for key in LARGEST for names in {(), tuple(self.adapters.scales)})
        return needed if len(self.adapters) < 2 else 2 * needed
