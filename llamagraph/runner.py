"""Runs a model: load, plan, prefill in row buckets, decode. Yields token ids; knows no text.

The sequence lives on the device. The runner keeps only its length and tells the device what cannot
be known there: how many rows a step has, and which program fits it.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from llamagraph import models
from llamagraph.errors import DeviceError, FormatError, LlamaGraphError, MemoryLimitError
from llamagraph.execute import EXECUTORS, ExecutorCache
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import attention_class, attention_vars
from llamagraph.kernels.layouts import layout, stored_bytes
from llamagraph.kernels.repack import Tiler
from llamagraph.kernels.step import step_io
from llamagraph.kvcache import KVCache
from llamagraph.program.device import Device
from llamagraph.program.launch import Buffer, Program, StepKey
from llamagraph.program.plan import ALIGNMENT
from llamagraph.program.tape import Tape
from llamagraph.program.weights import Weights
from llamagraph.sampling import SamplingParams

ROW_BUCKETS = (1, 8, 32, 128, 512)
UNKNOWN = -1  # a token that no step has published yet
LARGEST = (  # the steps that need most scratch; a missing tensor shows while they are planned
    StepKey(ROW_BUCKETS[-1], "all"), StepKey(8, "all", "long"), StepKey(1, "last", "long", "chain"),
)
SILENCE_SECONDS = 2.0  # after which the device is asked whether it has failed
Progress = Callable[[str, int, int], None]


def row_bucket(n: int) -> int:
    """The smallest bucket that holds n rows."""
    return next(b for b in ROW_BUCKETS if b >= n)


class Runner:
    """A loaded model on a device, and one sequence of up to `n_ctx` tokens.

    `progress(label, done, total)` hears of the bytes loaded, `warn` a line where graphs fail.
    """

    def __init__(self, file: GGUFFile, device: Device, mode: str = "stream",
                 n_ctx: int | None = None, progress: Progress | None = None,
                 warn: Callable[[str], None] = lambda _: None):
        self.device, self.mode, self._warn = device, mode, warn
        architecture = models.load(file.metadata)
        self._step, self.config = architecture.step, architecture.config(file.metadata)
        self._asked, self.n_ctx = n_ctx, n_ctx or self.config.n_ctx_train
        self.io = step_io(self.n_ctx)
        kv_type = "F16" if device.target.is_cuda else "F32"
        self.kv = KVCache(self.config.layers, self.n_ctx, ROW_BUCKETS[-1], kv_type)
        self.n_past = 0  # tokens of the sequence that steps have read, or are about to
        self.sequence: list[int] = []
        self._load(file, progress or (lambda *_: None))
        self.executors = ExecutorCache(self._executor)

    def _load(self, file: GGUFFile, progress: Progress) -> None:
        memory = self.device.memory
        self.n_vocab = self._check_shapes(file)
        sources = self._sources(file)
        buffers, offset = {}, 0
        for name, (dtype, shape, _) in sources.items():
            order = layout(self.device.target, dtype, shape)
            stop = offset + stored_bytes(dtype, shape, order)
            buffers[name] = Buffer(name, "weights", offset, stop, dtype, shape, order)
            offset = -(-buffers[name].stop // ALIGNMENT) * ALIGNMENT
        self.weights = Weights(buffers, str(file.path))
        scratch = max(self.plan(key).scratch_bytes for key in LARGEST)
        self._check_memory(file, buffers, scratch)
        for arena, n_bytes in (("weights", offset), ("kv", self.kv.n_bytes), ("scratch", scratch),
                               ("io", self.io["counters"].stop),
                               ("mapped", self.io["published"].stop)):
            memory.reserve(arena, n_bytes)
        memory.grow("io", 0, self.io["counters"].stop)
        self._published = memory.host_view(self.io["published"])
        tiler = Tiler(self.device.target)
        for name, (_, _, raw) in sources.items():
            progress("load", buffers[name].start, offset)
            memory.upload(buffers[name], raw, tiler)
        progress("load", offset, offset)
        memory.write(self.io["one"], [1])
        memory.write(self.io["counters"], np.zeros(self.io["counters"].shape, np.uint32))
        self.reset()

    def _sources(self, file: GGUFFile) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
        """Type, shape and bytes of every weight: the file's tensors and the rope tables.

        Vectors (norms, biases) become F32 whatever the file holds them in.
        """
        vectors: dict[str, np.ndarray] = {}
        sources: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}
        for name, t in file.tensors.items():
            if len(t.shape) == 1:
                vectors[name] = t.quant.dequantise(file.data(name), t.shape)
            else:
                sources[name] = (t.quant.name, tuple(t.shape), file.data(name))
        factors = vectors.pop("rope_freqs.weight", None)
        for name, rope in self.config.ropes.items():
            if factors is not None and len(factors) != rope.n_rot // 2:
                raise FormatError(f"{file.path}: tensor rope_freqs.weight has {len(factors)} "
                                  f"values for {rope.n_rot // 2} rotated pairs")
            vectors[f"rope.{name}.weight"] = rope.inv_freq(factors)
        return sources | {n: ("F32", v.shape, v.view(np.uint8)) for n, v in vectors.items()}

    def _check_shapes(self, file: GGUFFile) -> int:
        """The tensors against the metadata, before anything is allocated; the vocabulary's size."""
        found = {name: tuple(t.shape) for name, t in file.tensors.items()}
        n_vocab = len(file.metadata.scalar("tokenizer.ggml.tokens", list, ()))
        n_vocab = n_vocab or found.get("token_embd.weight", (0,))[0]
        self.config.check(file.path, found, n_vocab)
        return n_vocab

    def _check_memory(self, file: GGUFFile, buffers: dict[str, Buffer], scratch: int) -> None:
        """MemoryLimitError before anything is allocated: a context that was asked for must fit."""
        base = sum(self.device.memory.weight_bytes(b) for b in buffers.values()) + scratch
        free = self.device.memory.available()
        needed = base + self.kv.bytes_at(self._asked or 1)
        if needed <= free:
            return
        fits = bisect_right(range(self.n_ctx + 1), free - base, key=self.kv.bytes_at) - 1
        fix = f"use -c {fits} or less" if fits > 0 else "take a smaller model or another --device"
        raise MemoryLimitError(f"{file.path}: {needed / 1e9:.2f} GB of memory are needed, "
                               f"{free / 1e9:.2f} GB are free; {fix}")

    def plan(self, key: StepKey) -> Program:
        """The launches of a step for the device's target."""
        tape = Tape(self.device.target, key, self.io)
        self._step(tape, self.weights, self.kv.layers, self.config)
        return tape.program()

    def _executor(self, key: StepKey) -> Any:
        program = self.plan(key)
        used = self.device.memory.account().get("scratch", 0)
        if program.scratch_bytes > used:
            self.device.memory.grow("scratch", used, program.scratch_bytes)
        vars = attention_vars(self.device.target, self.n_past + 1)
        try:
            return EXECUTORS[self.mode](self.device, program, vars)
        except DeviceError as error:
            if self.mode == "stream":
                raise
            self._warn(f"no graphs: {error}; launching one by one")
            self.mode = "stream"
            return EXECUTORS[self.mode](self.device, program, vars)

    def reset(self, n_past: int = 0) -> None:
        """Takes the sequence back to its first `n_past` tokens."""
        assert n_past <= self.n_past
        self.device.queue.wait()
        self.n_past = n_past
        self.device.memory.write(self.io["pos"], [n_past])
        self._published[n_past:] = UNKNOWN
        del self.sequence[n_past:]

    def write_tokens(self, tokens: Sequence[int]) -> None:
        """Writes the tokens that follow the sequence; a step must then read them."""
        if self.n_past + len(tokens) > self.n_ctx:
            raise LlamaGraphError(
                f"{self.n_past + len(tokens)} tokens do not fit the context of {self.n_ctx}; "
                f"shorten the prompt or raise -c"
            )
        self.device.memory.write(self.io["tokens"], np.array(tokens, np.int32), self.n_past)
        self.sequence[self.n_past :] = tokens

    def step(self, n_rows: int, logits: str, sampler: str) -> Any:
        """Queues one step over the next `n_rows` tokens; the executor that ran it."""
        kv_len = self.n_past + n_rows
        depth = attention_class(kv_len) if n_rows == 1 else "short"
        key = StepKey(row_bucket(n_rows), logits, depth, sampler)
        self.kv.grow(self.device.memory, kv_len)
        executor = self.executors[key]
        executor.run(attention_vars(self.device.target, kv_len))
        self.n_past = kv_len
        return executor

    def prefill(self, tokens: Sequence[int], sampler: str = "greedy") -> Any:
        """Reads the tokens in buckets; the next token is chosen after the last."""
        self.write_tokens(tokens)
        left = len(tokens)
        while left:
            n = min(left, ROW_BUCKETS[-1])
            left -= n
            self.device.memory.write(self.io["n_rows"], [n])
            executor = self.step(n, "none" if left else "last", sampler)
        return executor

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 (n_tokens, n_vocab): the logits after each of the tokens that follow."""
        self.write_tokens(tokens)
        parts = []
        for first in range(0, len(tokens), ROW_BUCKETS[-1]):
            n = min(len(tokens) - first, ROW_BUCKETS[-1])
            self.device.memory.write(self.io["n_rows"], [n])
            parts.append(self.read_logits(self.step(n, "all", "greedy"))[:n])
        return np.concatenate(parts)

    def read_logits(self, executor: Any) -> np.ndarray:
        """The logits that the executor's last step left."""
        return self.device.memory.read(executor.program.outputs["logits"])

    def chosen(self, position: int) -> int:
        """The token that a step has chosen, or is about to choose, for a position."""
        give_up = time.monotonic() + SILENCE_SECONDS
        while (token := int(self._published[position])) < 0:
            if time.monotonic() > give_up:
                self.device.queue.wait()  # a fault of the device shows here
                give_up = time.monotonic() + SILENCE_SECONDS
        return token

    def generate(self, prompt: Sequence[int], params: SamplingParams, limit: int = -1,
                 seen: Callable[[Any], None] | None = None) -> Iterator[int]:
        """Token ids after the prompt, up to `limit` or the end of the context.

        `seen(executor)` is called after each step, before the next one is queued. Without it the
        next step is queued before a token is handed out; what ran too far is taken back.
        """
        sampler = params.sampler(self.device.target, self.n_vocab)
        params.write(self.device.memory, self.io)
        executor = self.prefill(prompt, sampler)
        position, ahead = self.n_past, self.device.queue.ahead and not seen and sampler != "host"
        try:
            for produced in count(1):
                if seen:
                    seen(executor)
                if sampler == "host":
                    self._choose(executor, params)
                last = produced == limit or position >= self.n_ctx
                if ahead and not last:
                    self.step(1, "last", sampler)
                self.sequence.append(self.chosen(position))
                yield self.sequence[-1]
                if last:
                    return
                if not ahead:
                    executor = self.step(1, "last", sampler)
                position += 1
        finally:
            self.reset(min(position, self.n_past))

    def _choose(self, executor: Any, params: SamplingParams) -> None:
        """Chooses on the host, and gives the token to the next step."""
        token = params.choose(self.read_logits(executor)[0], self.sequence)
        self.device.memory.write(self.io["tokens"], [token], self.n_past)
        self._published[self.n_past] = token

    def close(self) -> None:
        self.executors.close()
        self.device.close()
