"""An answer as it grows: a runner's tokens become text, until there is a reason to stop.

Knows a runner and a tokenizer; no file, no device and no terminal.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from llamagraph.errors import LlamaGraphError
from llamagraph.planner import keys_of_rows, usual_keys
from llamagraph.sampling import SamplingParams
from llamagraph.text.matcher import Constraint, Matcher
from llamagraph.text.stops import StopText
from llamagraph.timings import Timings


class Token(NamedTuple):
    """A token and the characters that it completed."""

    id: int
    text: str


@dataclass
class Generation:
    """An answer as it grows: iterate for its tokens, read the rest at any time.

    `stop_reason`: "eog", "limit", "context", "stop" (a stop string), or None while it runs. An
    end-of-generation token is not part of `tokens`. `keep` is None where a full context ends the
    answer; `prompt_read` is called once the whole prompt is in the KV cache.
    """

    model: Any  # with its runner, tokenizer and load_seconds
    prompt_tokens: list[int]
    params: SamplingParams
    limit: int = -1
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    n_logprobs: int = 0
    matcher: Matcher | None = None
    special: bool = False
    keep: int | None = None
    reuse: bool = True
    prompt_read: Callable[[], None] | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stop_reason: str | None = None
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)

    def __iter__(self) -> Iterator[Token]:
        if self.tokens or self.stop_reason:
            raise LlamaGraphError("an answer can be iterated once; call generate again")
        for token in self._tokens():
            self.text += token.text
            yield token

    def warm_up(self) -> None:
        """Makes what the answer's steps need before it is iterated, and runs two of them."""
        runner = self.model.runner
        constraint = Constraint(self.matcher) if self.matcher else None
        self.prepare()
        runner.reset()
        for _ in runner.generate(self.prompt_tokens[:1], self.params, 2, constraint=constraint):
            pass
        runner.reset()

    def prepare(self, rows: Sequence[int] = ()) -> None:
        """Makes the programs that the answer will run, or those of so many rows: now, as a part of
        loading, so that no token waits for them."""
        start, runner = time.perf_counter(), self.model.runner
        sampler = runner.sampler(self.params, self.matcher is not None)
        n_prompt = len(self.prompt_tokens)
        loop_to = runner.loop_to(n_prompt, self.limit)
        keys = (keys_of_rows(rows, sampler, loop_to is not None) if rows
                else usual_keys(n_prompt, sampler, runner.most_rows, loop_to))
        runner.prepare(keys, loop_to or n_prompt + 1)
        self.model.load_seconds += time.perf_counter() - start

    def _tokens(self) -> Iterator[Token]:
        runner, tokenizer = self.model.runner, self.model.tokenizer
        constraint = Constraint(self.matcher) if self.matcher else None
        self.timings = Timings(self.model.load_seconds, constraint=constraint)
        decoder, stop = tokenizer.decoder(special=self.special), StopText(self.stop)
        start = time.perf_counter()
        if self.limit == 0:
            if self.prompt_read:  # the prompt is kept, without an answer
                self._unread()
                self.timings.first_token_seconds = self.timings.seconds = (
                    time.perf_counter() - start)
            self.stop_reason = "limit"
            return
        left = self._unread()
        seen = self._take_logprobs if self.n_logprobs else None
        eog = () if self.ignore_eos else tokenizer.eog
        for id in runner.generate(left, self.params, self.limit, seen, constraint, eog, self.keep):
            self.timings.seconds = time.perf_counter() - start
            self.timings.n_generated += 1
            if self.timings.n_generated == 1:
                self.timings.first_token_seconds = self.timings.seconds
            if tokenizer.is_eog(id) and not (self.ignore_eos and constraint is None):
                self.stop_reason = "eog"
                if rest := stop.feed(decoder.flush()) + stop.flush():
                    yield Token(id, rest)
                return
            self.tokens.append(id)
            text = stop.feed(decoder.feed(id))
            if stop.stopped:
                self.stop_reason = "stop"
            elif self.timings.n_generated == self.limit:
                self.stop_reason = "limit"
            elif runner.ends(self.keep):
                self.stop_reason = "context"
            if self.stop_reason and not stop.stopped:
                text += stop.feed(decoder.flush()) + stop.flush()
            yield Token(id, text)
            if self.stop_reason:
                return

    def _unread(self) -> list[int]:
        """Takes the runner to the prompt; the tokens of it that are left to read."""
        runner = self.model.runner
        if not self.reuse:
            runner.reset()
        left = runner.resume(self.prompt_tokens, self.keep)
        self.timings.n_prompt = len(left)
        self.timings.n_reused = len(self.prompt_tokens) - len(left)
        if self.prompt_read:
            runner.prefill(left)
            self.prompt_read()
            left = runner.resume(self.prompt_tokens) if self.limit else []
        return left

    def _take_logprobs(self, executor: Any) -> None:
        logits = self.model.runner.read_logits(executor)[0].astype(np.float64)
        ids = np.argsort(-logits, kind="stable")[: self.n_logprobs]
        total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        self.logprobs.append([(int(i), float(logits[i] - total)) for i in ids])
