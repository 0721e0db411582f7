"""One sequence of tokens: what the device has read of it, what it chooses, and how it goes back.

Tokens and position lie on the device; this side knows which tokens they are. Knows no program and
no model.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.program.device import Device
from llamagraph.program.launch import Buffer

UNKNOWN = 0  # published by no step yet; tokens are published as their id + 1
SILENCE_SECONDS = 2.0  # after which the device is asked whether it has failed
REST_SECONDS, REST_SHARE = 0.01, 1 / 32  # of the wait for a loop's token: at most, of what it took


class TokenSequence:
    """Up to `n_ctx` tokens. Whoever can run steps adds how they are read."""

    mode: str
    n_vocab: int
    _published: np.ndarray  # mapped: the chosen tokens by position
    _stop: np.ndarray  # mapped: 1 ends a loop

    def __init__(self, device: Device, io: Mapping[str, Buffer], n_ctx: int):
        self.device, self.io, self.n_ctx = device, io, n_ctx
        self.n_past = 0  # tokens of the sequence that steps have read, or are about to
        self.sequence: list[int] = []
        self._began = 0.0  # when tokens were written last
        self._turn = 0  # of an answer; it ends when the sequence is changed from outside

    def reset(self, n_past: int = 0) -> None:
        """Takes the sequence back to its first `n_past` tokens."""
        assert n_past <= self.n_past
        self._turn += 1
        self._stop_loop()
        self._published[n_past : self.n_past + 1] = UNKNOWN
        self.n_past = n_past
        self.device.memory.write(self.io["pos"], [n_past])
        del self.sequence[n_past:]

    def _stop_loop(self) -> None:
        """Returns once nothing runs; where a loop does, its step is the last one."""
        self._stop[0] = 1
        try:
            self.device.queue.wait()
        finally:
            self._stop[0] = 0

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
