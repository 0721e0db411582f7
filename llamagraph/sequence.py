"""One sequence of tokens: what the device has read and chosen, how it goes back, what it drops.

Tokens, position and KV lie on the device; this side knows which tokens they are. What a full
context drops depends on the number of tokens alone, so a longer text of which much has been read
already shows where it goes on. Knows no program and no model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.kvcache import KVCache
from llamagraph.program.device import Device
from llamagraph.program.launch import Buffer

UNKNOWN = 0  # published by no step yet; tokens are published as their id + 1
SILENCE_SECONDS = 2.0  # after which the device is asked whether it has failed
REST_SECONDS, REST_SHARE = 0.01, 1 / 32  # of the wait for a loop's token: at most, of what it took


def n_dropped(n_ctx: int, keep: int) -> int:
    """How many tokens behind the first `keep` a full context drops: half, or one more, so that the
    others move to where dropped ones were; 0 where that leaves nothing behind `keep`."""
    rest = n_ctx - keep
    return rest - rest // 2 if rest > 1 else 0


def folded(tokens: Sequence[int], n_ctx: int, keep: int) -> list[int]:
    """What is left in a context that drops tokens each time it is full, after all of these."""
    step = n_dropped(n_ctx, keep)
    times = -(-max(0, len(tokens) - n_ctx) // step) if step else 0
    return [*tokens[:keep], *tokens[keep + times * step :]]


def n_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the beginning that two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))


class TokenSequence:
    """Up to `n_ctx` tokens. Whoever can run steps adds how tokens are read: `prefill`, `shift`."""

    prefill: Callable[..., Any]
    shift: Callable[[int], int]
    mode: str
    n_vocab: int
    _published: np.ndarray  # mapped: the chosen tokens by position
    _stop: np.ndarray  # mapped: 1 ends a loop

    def __init__(self, device: Device, io: Mapping[str, Buffer], kv: KVCache, n_ctx: int):
        self.device, self.io, self.kv, self.n_ctx = device, io, kv, n_ctx
        self.n_past = 0  # tokens of the sequence that steps have read, or are about to
        self.sequence: list[int] = []
        self.n_shifts = 0  # since it began with its first token
        self._began = 0.0  # when tokens were written last
        self._turn = 0  # of an answer; it ends when the sequence is changed from outside
        self.before_step: Callable[[], object] = lambda: None  # what it raises ends an answer

    def reset(self, n_past: int = 0) -> None:
        """Takes the sequence back to its first `n_past` tokens; an answer that still runs ends.

        Where a layer's ring has lost what these need, they are read again.
        """
        assert n_past <= self.n_past
        self._turn += 1
        self._stop_loop()
        if self.n_past:
            self.kv.stored(int(self.device.memory.read(self.io["pos"])[0]))
        del self.sequence[n_past:]
        if n_past and not self.kv.goes_back(n_past):
            self._read_again(self.sequence)
        else:
            self._go_on_at(n_past)

    def _stop_loop(self) -> None:
        """Returns once nothing runs; where a loop does, its step is the last one."""
        self._stop[0] = 1
        try:
            self.device.queue.wait()
        finally:
            self._stop[0] = 0

    def _go_on_at(self, n_past: int) -> None:
        """What the device must know once nothing runs: the next step reads token n_past."""
        self._published[n_past : self.n_past + 1] = UNKNOWN
        self.n_past = n_past
        self.device.memory.write(self.io["pos"], [n_past])
        if n_past == 0:
            self.kv.held = self.n_shifts = 0

    def take_as_read(self, n_past: int) -> None:
        """Tokens whose KV was written from outside; nothing runs."""
        self.n_past = n_past
        self._go_on_at(n_past)

    def _read_again(self, tokens: Sequence[int]) -> None:
        """All of the sequence, from its first token on."""
        self._go_on_at(0)
        self.sequence = []
        self.prefill(tokens)
        self.device.queue.wait()
        self._go_on_at(len(tokens))

    def write_tokens(self, tokens: Sequence[int]) -> None:
        """Writes the tokens that follow the sequence; a step must then read them."""
        if bad := [t for t in tokens if not 0 <= t < self.n_vocab]:
            raise LlamaGraphError(f"token {bad[0]} is none of the model's, 0 to {self.n_vocab - 1}")
        if self.n_past + len(tokens) > self.n_ctx:
            raise LlamaGraphError(
                f"{self.n_past + len(tokens)} tokens do not fit the context of {self.n_ctx}; "
                f"shorten the prompt or raise -c"
            )
        self.device.memory.write(self.io["tokens"], np.array(tokens, np.int32), self.n_past)
        self.sequence[self.n_past :] = tokens
        self._began = time.monotonic()

    def resume(self, tokens: Sequence[int], keep: int | None = None) -> list[int]:
        """Takes the sequence back to the beginning that it shares with the tokens; those that are
        left to read, at least the last one.

        With `keep` it drops tokens first where it then shares more, as it would have done by now.
        What a step computes depends in its last bits on how many tokens it reads, so the logits
        are those of all tokens read anew within rounding, not bit for bit.
        """
        self.reset(min(self.n_past, len(self.sequence)))
        shared, step = n_shared(self.sequence, tokens), 0
        if keep is not None and keep + (step := n_dropped(self.n_ctx, keep)) <= self.n_past:
            moved = self.sequence[:keep] + self.sequence[keep + step :]
            if step and (then := n_shared(moved, tokens)) > shared:
                self.shift(keep)
                shared = then
        n = min(shared, len(tokens) - 1)
        self.reset(n if self.kv.goes_back(n) else 0)
        return list(tokens[n if self.n_past else 0 :])

    def ends(self, keep: int | None) -> bool:
        """Whether the token that was handed out last has no place, and none becomes free."""
        return len(self.sequence) > self.n_ctx and not (
            keep is not None and n_dropped(self.n_ctx, keep))

    def chosen(self, position: int) -> int:
        """The token that a step has chosen, or is about to choose, for a position."""
        return (int(self._published[position]) or self._awaited(position)) - 1

    def _awaited(self, position: int) -> int:
        """What a step publishes there. In a loop nothing hurries: the device goes on by itself."""
        give_up = time.monotonic() + SILENCE_SECONDS
        while (published := int(self._published[position])) == UNKNOWN:
            now = time.monotonic()
            if now > give_up:
                self.device.queue.wait()  # a fault of the device shows here
                assert self._published[position] != UNKNOWN, f"no step chose token {position}"
            elif self.mode == "loop":
                self.device.queue.rest(min(REST_SECONDS, REST_SHARE * (now - self._began)))
        return published
