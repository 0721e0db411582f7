"""The Python face: open a model, generate, read logits. Knows no terminal and no options.

    with llamagraph.open("model.gguf") as model:
        for id, text in model.generate("The capital of France is", temp=0):
            print(text, end="")
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llamagraph import promptcache
from llamagraph.adapters import Adapters, Source
from llamagraph.devices import open_device
from llamagraph.errors import LlamaGraphError
from llamagraph.execute import EXECUTORS
from llamagraph.generation import Generation
from llamagraph.gguf.hub import default_model
from llamagraph.gguf.reader import GGUFFile
from llamagraph.program.device import Device
from llamagraph.runner import Runner
from llamagraph.sampling import BANNED, SamplingParams, file_defaults
from llamagraph.text import Tokenizer
from llamagraph.text.breakers import sequence_breakers
from llamagraph.text.gbnf import parse_grammar
from llamagraph.text.json_schema import schema_to_gbnf
from llamagraph.text.matcher import Matcher


class Model:
    """A loaded model. Close it, or use it in a `with` statement."""

    def __init__(self, file: GGUFFile, device: Device, mode: str | None = None,
                 n_ctx: int | None = None, progress: Callable[[str, int, int], None] | None = None,
                 warn: Callable[[str], None] = lambda _: None, n_ubatch: int = 2048,
                 type_k: str | None = None, type_v: str | None = None,
                 adapters: Adapters | None = None):
        start = time.perf_counter()
        self.file, self.path = file, file.path
        self.tokenizer = Tokenizer(file.metadata, str(file.path))
        mode = mode or ("capture" if device.target.is_cuda else "stream")
        if mode not in EXECUTORS:
            raise LlamaGraphError(f"mode {mode!r} is unknown; there are {', '.join(EXECUTORS)}")
        for warning in self.tokenizer.warnings:
            warn(warning)
        self.sampling_defaults = file_defaults(file.metadata)
        self.runner = Runner(file, device, mode, n_ctx, progress, warn, n_ubatch, type_k, type_v,
                             adapters)
        self.load_seconds = time.perf_counter() - start

    def generate(self, prompt: str | Sequence[int], *, limit: int = -1,
                 stop: str | Sequence[str] = (),
                 ignore_eos: bool = False, logprobs: int = 0, special: bool = False,
                 grammar: str | Matcher | None = None, context_shift: bool = False, keep: int = 0,
                 reuse: bool = True, prompt_read: Callable[[], None] | None = None,
                 **sampling: Any) -> Generation:
        """An answer to raw text or token ids, up to `limit` tokens (-1: no limit).

        What the prompt shares with the tokens in the KV cache is not read again, unless `reuse` is
        false: logits are then the same within rounding, for a step of another size adds in another
        order. With `context_shift` a full context keeps its first `keep` tokens (-1: the prompt)
        beside a BOS, drops half of the rest, and the answer goes on.

        `sampling` are the fields of `SamplingParams`, the file's recommendations where they are not
        given; `logprobs` the number of likeliest tokens to keep a step; with `special` the texts
        of control tokens are shown. `grammar` is what the answer must look like, in GBNF or from
        `matcher`. Raises LlamaGraphError for an empty prompt or one that is too long.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise LlamaGraphError("the prompt is empty; give some text")
        params = self._params(sampling, ignore_eos)
        stop = [stop] if isinstance(stop, str) else stop
        if isinstance(grammar, str):
            grammar = self.matcher(grammar)
        kept = self._kept(ids, keep) if context_shift else None
        return Generation(self, ids, params, limit, stop, ignore_eos, logprobs, grammar, special,
                          kept, reuse, prompt_read)

    def _kept(self, prompt: Sequence[int], keep: int) -> int:
        """How many of the prompt's tokens a shift keeps (llama.cpp's rule: N, and a BOS)."""
        if keep < 0 or keep > len(prompt):
            return len(prompt)
        return min(len(prompt), keep + self.tokenizer.add_bos)

    def _params(self, sampling: dict[str, Any], ignore_eos: bool) -> SamplingParams:
        """The parameters of an answer, with the biases and breakers that the vocabulary gives."""
        try:
            params = SamplingParams(**{**self.sampling_defaults, **sampling}).seeded()
        except TypeError as error:
            raise LlamaGraphError(f"unknown sampling parameter: {error}") from None
        if bad := [id for id in params.logit_bias if not 0 <= id < self.tokenizer.n_vocab]:
            raise LlamaGraphError(f"logit bias for token {bad[0]}; the model has tokens 0 to "
                                  f"{self.tokenizer.n_vocab - 1}")
        if ignore_eos:
            banned = dict.fromkeys(self.tokenizer.eog, BANNED)
            params = replace(params, logit_bias={**params.logit_bias, **banned})
        if "dry" in params.chain().samplers and not params.dry_breakers:
            texts = [self.tokenizer.token_bytes(id).decode(errors="replace")
                     for id in range(self.tokenizer.n_vocab)]
            breakers = sequence_breakers(
                params.dry_sequence_breakers, texts,
                lambda text: self.tokenizer.encode(text, add_special=False, parse_special=False),
            )
            params = replace(params, dry_breakers=breakers)
        if params.reasoning_budget >= 0:
            params = replace(params, thinking=self.tokenizer.thinking_tags())
        return params

    def matcher(self, grammar: str = "", source: str = "grammar", *,
                json_schema: Any = None) -> Matcher:
        """A GBNF grammar, or a JSON schema as text or data, for `generate`; good for any number.

        Raises LlamaGraphError with `source` and the place for what is wrong in it.
        """
        if json_schema is not None:
            grammar = schema_to_gbnf(json_schema, source)
        rules = parse_grammar(grammar, source, self.tokenizer.single_token)
        return Matcher(rules, self.tokenizer.trie)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 (n_tokens, n_vocab): what the model expects after each of the tokens."""
        if len(tokens) == 0:
            raise LlamaGraphError("there are no tokens to read logits after")
        self.runner.reset()
        return self.runner.logits(tokens)

    @property
    def adapters(self) -> dict[str, float]:
        """The scales of the LoRA adapters, by name: a file's own, without its ending."""
        return dict(self.runner.adapters.scales)

    def scale_adapter(self, name: str, scale: float) -> None:
        """Gives an adapter another scale, from the next answer on; 0 takes it out of the steps."""
        runner = self.runner
        runner.reset()  # what is in the KV cache was computed with the old one
        runner.adapters.set(name, scale)
        runner.adapters.write(runner.device.memory, runner.io)

    def save_state(self, path: str | Path) -> None:
        """Writes the tokens that are in the KV cache, and the cache; see `promptcache`."""
        promptcache.save(Path(path), self.file, self.runner)

    def load_state(self, path: str | Path) -> int:
        """Takes such a file's place in its text; how many tokens the next prompt may share.

        Raises LlamaGraphError with the reason where the file is not of this model.
        """
        return promptcache.load(Path(path), self.file, self.runner)

    def close(self) -> None:
        """Frees the model and its device, also one that was passed in open."""
        try:
            self.runner.close()
        finally:
            self.file.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(path: str | Path | GGUFFile | None = None, *, device: str | Device | None = None,
         mode: str | None = None, n_ctx: int | None = None, n_threads: int | None = None,
         l2_persist: str = "off", arch_tuning: str | None = None, offline: bool = False,
         progress: Callable[[str, int, int], None] | None = None,
         warn: Callable[[str], None] = lambda _: None, n_ubatch: int = 2048,
         overrides: Mapping[str, Any] | None = None, type_k: str | None = None,
         type_v: str | None = None, lora: Sequence[Source] = ()) -> Model:
    """Opens a GGUF file (None: the default model, fetched once) on a device.

    `path` may also be an open GGUFFile, which the model then closes. `device` is "auto", "cpu",
    "cuda" or an open device; `mode` one of `llamagraph.execute`'s EXECUTORS; `n_ctx` the longest
    sequence (None: the model's own); `n_ubatch` the most tokens of a prompt that a step reads.
    `type_k` and `type_v` are the types of the KV cache: f32, f16, bf16, q8_0 or q4_0.
    `lora` are adapters to apply: GGUF files, alone or in a pair with their scale.
    `overrides` are metadata in place of the file's. With `l2_persist` "auto" a GPU keeps what it
    can of the weights in its L2 cache. `arch_tuning` is the target, as in "sm_80", whose choices
    of kernels are taken. `warn` hears single lines.
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(
        path if path is not None else default_model(offline, progress), overrides
    )
    opened = None
    try:
        if device is None or isinstance(device, str):
            device = opened = open_device(device or "auto", n_threads=n_threads, warn=warn,
                                          persist=l2_persist == "auto", arch_tuning=arch_tuning)
        with Adapters(lora, file, warn) as adapters:
            return Model(file, device, mode, n_ctx, progress, warn, n_ubatch, type_k, type_v,
                         adapters)
    except BaseException:
        if opened is not None:
            opened.close()
        file.close()
        raise


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file, without its weights."""
    with GGUFFile(path) as file:
        return Tokenizer(file.metadata, str(path))
