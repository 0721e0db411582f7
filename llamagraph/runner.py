"""Runs a model: load, plan, prefill in row buckets, decode. Yields token ids; knows no text.

The sequence lives on the device. The runner tells the device what cannot be known there: how many
rows a step has, and which program fits it.
"""

import sys
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llamagraph.adapters import Adapters
from llamagraph.errors import DeviceError, LlamaGraphError, MemoryLimitError
from llamagraph.execute import EXECUTORS, ExecutorCache
from llamagraph.gguf.reader import GGUFFile
from llamagraph.kernels.attention import attention_vars
from llamagraph.kernels.step import MAX_EOG
from llamagraph.loading import Progress, load
from llamagraph.planner import LOGIT_ROWS, ROW_BUCKETS, SHIFT, Planner, prompt_steps, step_key
from llamagraph.program.device import Device
from llamagraph.program.launch import Program, StepKey
from llamagraph.sampling import SamplingParams
from llamagraph.sampling_host import HostChain
from llamagraph.sequence import TokenSequence, n_dropped
from llamagraph.text.matcher import Constraint

LOOP_STEPS = 1024  # of a launch that nobody has limited: memory is there for all of them


class Runner(TokenSequence):
    """A loaded model on a device, and one sequence of up to `n_ctx` tokens.

    `progress(label, done, total)` hears of the bytes loaded, `warn` a line where graphs fail.
    A step reads at most `n_ubatch` tokens of a prompt; the planner knows the last three.
    """

    def __init__(self, file: GGUFFile, device: Device, mode: str = "stream",
                 n_ctx: int | None = None, progress: Progress | None = None,
                 warn: Callable[[str], None] = lambda _: None, n_ubatch: int = ROW_BUCKETS[-1],
                 type_k: str | None = None, type_v: str | None = None,
                 adapters: Adapters | None = None):
        planner = Planner(file, device.target, n_ctx, type_k, type_v, adapters)
        super().__init__(device, planner.io, planner.kv, planner.n_ctx)
        self._warn = warn
        self.most_rows = min(n_ubatch, ROW_BUCKETS[-1])
        self.plan, self.config, self.n_vocab = planner.plan, planner.config, planner.n_vocab
        self.weights, self.adapters = planner.weights, planner.adapters
        load(file, device, planner, n_ctx, progress or (lambda *_: None))
        self._published, self._candidates, self._stop = (
            device.memory.host_view(self.io[name]) for name in ("published", "candidates", "stop"))
        self.reset()
        self._caches: dict[str, ExecutorCache] = {}
        self._instead: dict[str, str] = {}  # of modes that the device has refused
        self.use(mode)
        self._planned: dict[StepKey, Program] = {}  # whose executors are about to be made
        self._open = True

    def use(self, mode: str) -> None:
        """Runs steps in that mode from here on; other modes' executors can be used again."""
        self.executors = self._caches.setdefault(mode, ExecutorCache(self._executor))
        while mode in self._instead:
            mode = self._instead[mode]
        self.mode = mode

    def _executor(self, key: StepKey, old: Any = None) -> Any:
        program = self._planned.pop(key, None) or self._program(key)
        used = self.device.memory.account().get("scratch", 0)
        if program.scratch_bytes > used:
            self.device.memory.grow("scratch", used, program.scratch_bytes)
        vars = attention_vars(self.device.target, self.n_past + 1)
        try:
            return EXECUTORS[self.mode](self.device, program, vars, old)
        except (DeviceError, MemoryLimitError) as error:
            if self.mode == "stream":
                raise
            self._give_up(error)
            return self._executor(key, old)

    def _program(self, key: StepKey) -> Program:
        """The key's, which repeats itself only where there are loops."""
        return self.plan(key if self._loops() else replace(key, repeats=False))

    def _loops(self) -> bool:
        """Whether decode steps repeat themselves; asked before a kernel of theirs is loaded."""
        if self.mode == "loop" and self.device.graphs.no_loop:
            self._give_up(self.device.graphs.no_loop)
        return self.mode == "loop"

    def _give_up(self, why: object) -> None:
        """Runs steps in a simpler mode from here on, and says so."""
        what, instead, how = (("loop", "capture", "a graph a token") if self.mode == "loop"
                              else ("graphs", "stream", "one by one"))
        self._warn(f"no {what}: {why}; launching {how}")
        self._instead[self.mode], self.mode = instead, instead

    def prepare(self, keys: Sequence[StepKey], kv_len: int = 1) -> None:
        """Makes the executors of these programs, for steps at about that KV length.

        The kernels of all of them are loaded first, many at once. Of more programs than there is
        room for the first ones are made.
        """
        wanted = map(self.adapters.key, keys[: self.executors.limit])
        new = [key for key in wanted if key not in self.executors]
        self._planned = {key: self._program(key) for key in new}
        self.device.queue.load(
            launch.kernel for program in self._planned.values() for launch in program.launches
        )
        now, self.n_past = self.n_past, kv_len - 1
        try:
            for key in new:
                self.executors[key]
        finally:
            self.n_past = now
            self._planned.clear()

    def step(self, n_rows: int, logits: str, sampler: str, most: int = 1,
             eog: Collection[int] = ()) -> Any:
        """Queues one step over the next `n_rows` tokens; the executor that ran it.

        In mode `loop` a step of one row runs up to `most` times, fewer where one of the tokens
        `eog` is chosen; `n_past` then counts all of them.
        """
        self.before_step()
        loops, most = self._loops(), min(most, self.n_ctx - self.n_past)
        looped = self.n_past + (most if loops and n_rows == 1 else n_rows)
        key = step_key(n_rows, looped, logits, sampler, loops)
        executor = self.executors[self.adapters.key(key)]
        if executor.program.key.repeats:
            kv_len, known = looped, list(eog)[:MAX_EOG]  # the host sees the others end it
            self.device.memory.write(self.io["ends"], [kv_len, len(known), *known])
        else:
            kv_len = self.n_past + n_rows
        self.kv.grow(self.device.memory, kv_len)
        executor.run(attention_vars(self.device.target, kv_len))
        self.n_past = kv_len
        return executor

    def decode(self, n: int, sampler: str = "greedy") -> Any:
        """Queues n steps of one row, in as few launches as there can be; the last executor."""
        executor, end = None, self.n_past + n
        while self.n_past < end:
            executor = self.step(1, "last", sampler, end - self.n_past)
        return executor

    def prefill(self, tokens: Sequence[int], sampler: str = "greedy") -> Any:
        """Reads the tokens in buckets; the next token is chosen after the last."""
        self.write_tokens(tokens)
        for n, logits in prompt_steps(len(tokens), self.most_rows):
            self.device.memory.write(self.io["n_rows"], [n])
            executor = self.step(n, logits, sampler)
        return executor

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 (n_tokens, n_vocab): the logits after each of the tokens that follow."""
        self.write_tokens(tokens)
        parts = []
        for first in range(0, len(tokens), LOGIT_ROWS):
            n = min(len(tokens) - first, LOGIT_ROWS)
            self.device.memory.write(self.io["n_rows"], [n])
            parts.append(self.read_logits(self.step(n, "all", "greedy"))[:n])
        return np.concatenate(parts)

    def read_logits(self, executor: Any) -> np.ndarray:
        """The logits that the executor's last step left."""
        return self.device.memory.read(executor.program.outputs["logits"])

    def sampler(self, params: SamplingParams, constrained: bool) -> str:
        """Who chooses a token: the sampler of the StepKey."""
        if constrained:
            return "host"
        return params.sampler(self.device.target, self.n_vocab)

    def _reach(self, n_past: int, limit: int) -> tuple[int, int]:
        """The last position of an answer behind so many tokens; the most steps of a launch."""
        return (n_past + limit - 1, self.n_ctx) if limit > 0 else (sys.maxsize, LOOP_STEPS)

    def loop_to(self, n_past: int, limit: int) -> int | None:
        """The positions at the end of such an answer's first loop; None where there are none."""
        last, most = self._reach(n_past, limit)
        return min(last, self.n_ctx, n_past + most) if self._loops() else None

    def generate(self, prompt: Sequence[int], params: SamplingParams, limit: int = -1,
                 seen: Callable[[Any], None] | None = None, constraint: Constraint | None = None,
                 eog: Collection[int] = (), keep: int | None = None
                 ) -> Generator[int, None, None]:
        """Token ids after the prompt, up to `limit`, one of `eog` or the end of the context.

        With `keep` a full context drops tokens behind the first `keep`, and the answer goes on.
        `seen(executor)` is called after each step, before the next one is queued. Without it the
        next step, or a loop of all that follow, is queued before a token is handed out; what ran
        too far is taken back. With a `constraint` the host chooses each token, of those that it
        accepts. Raises LlamaGraphError once another answer has begun.
        """
        sampler = self.sampler(params, constraint is not None)
        params.write(self.device.memory, self.io)
        chain = HostChain(params)
        executor = self.prefill(prompt, sampler)
        position, ahead = self.n_past, not seen and sampler != "host" and (
            self.device.queue.ahead or self._loops())
        last, most = self._reach(position, limit)
        most = most if ahead else 1
        full = self.n_ctx if keep is None or not n_dropped(self.n_ctx, keep) else None
        turn = self._turn
        try:
            while True:
                if seen:
                    seen(executor)
                if sampler == "host":
                    self._choose(chain, constraint)
                if ahead and self.n_past == position < min(last, self.n_ctx):
                    self.step(1, "last", sampler, min(most, last - position), eog)
                self.sequence.append(token := self.chosen(position))
                yield token
                if position in (last, full) or token in eog:
                    return
                if self._turn != turn:
                    raise LlamaGraphError("another answer has begun; this one cannot go on")
                if position == self.n_ctx:
                    dropped = self._drop(keep or 0, chain)
                    position, last = position - dropped, last - dropped
                if self.n_past == position:
                    executor = self.step(1, "last", sampler, min(most, last - position), eog)
                position += 1
        except DeviceError:
            self._turn += 1  # after a fault nothing can be taken back
            raise
        finally:
            if self._turn == turn:
                self.reset(min(position, self.n_past))

    def _drop(self, keep: int, chain: HostChain) -> int:
        """A shift within an answer: what is drawn for a position is drawn anew."""
        chain.params = chain.params.continued()
        chain.params.write(self.device.memory, self.io)
        return self.shift(keep)

    def shift(self, keep: int) -> int:
        """Drops half of the tokens behind the first `keep`; how many. The others' KV moves.

        An answer may go on after it, when nothing of it is under way. Where a layer's ring has lost
        some of what is kept, the tokens that stay are read again.
        """
        n, step = self.n_past, n_dropped(self.n_ctx, keep)
        tokens = self.sequence[:keep] + self.sequence[keep + step :]  # the last may be unread
        self.device.queue.wait()
        self.kv.stored(n)
        if self.kv.shifts(n, keep, step):
            self.kv.grow(self.device.memory, self.n_ctx)  # rings move as wholes
            self.device.memory.write(self.io["moved"], [keep + step, n, step])
            self.executors[SHIFT].run({})
            self.device.queue.wait()
            self.kv.shifted(keep, step)
            self._go_on_at(n - step)
        else:
            self._read_again(tokens[: n - step])
        self.sequence = tokens
        self.n_shifts += 1
        self.device.memory.write(self.io["tokens"], tokens[keep:], keep)
        return step

    def _choose(self, chain: HostChain, constraint: Constraint | None) -> None:
        """Chooses on the host from what the step has copied, and gives the next one the token.

        Most tokens fit a constraint as they are; only where one does not all others are looked at.
        """
        self.device.queue.wait()
        logits = self._candidates
        token = chain.choose(logits, self.sequence)
        if constraint:
            if not constraint.accepts(token):
                token = chain.choose(constraint.masked(logits), self.sequence, again=True)
            constraint.advance(token)
        chain.accept(token)
        self.device.memory.write(self.io["tokens"], [token], self.n_past)
        self._published[self.n_past] = token + 1

    def close_executors(self) -> None:
        """All modes', once nothing runs any more; a step makes the one that it needs anew."""
        if any(map(len, self._caches.values())):  # else nothing runs
            self._stop_loop()
        for cache in self._caches.values():
            cache.close()

    def close(self) -> None:
        """Frees all, after the step that runs; again it does nothing."""
        self._turn += 1
        if self._open:
            self._open = False
            try:
                self.close_executors()
            finally:
                self.device.close()
