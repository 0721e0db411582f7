"""How the next token is chosen: the parameters, the order of the samplers, and the `io` arena.

The maths is in `kernels/sample.py` and `kernels/samplers.py`. Knows no model.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from llamagraph.errors import FormatError, LlamaGraphError
from llamagraph.kernels import samplers as host
from llamagraph.kernels.sample import Candidates, device_can, min_p, ordered, top_p, typical
from llamagraph.kernels.step import MAX_BIAS, SAMPLER_FLOATS, SAMPLER_INTS
from llamagraph.program.device import Memory
from llamagraph.program.launch import Buffer
from llamagraph.program.target import Target

BANNED = -1e30  # a bias that no logit outweighs
CONTINUED = 0x9E3779B97F4A7C15  # makes another seed, for positions that come a second time


class Now(NamedTuple):
    """What a sampler may see of the answer: the tokens so far, and a draw from [0, 1)."""

    sequence: np.ndarray
    chance: float

    def last(self, n: int) -> np.ndarray:
        """The last n tokens, all where n < 0."""
        return self.sequence if n < 0 else self.sequence[max(0, len(self.sequence) - n) :]


class Sampler(NamedTuple):
    """A sampler: its letter in --sampler-seq, the fields that turn it off, and what it does."""

    letter: str
    off: Mapping[str, float]
    apply: Callable[[Candidates, "SamplingParams", Now], Candidates]


# llama.cpp's names and letters, in its default order. A GPU's chain runs those of DEVICE.
SAMPLERS: Mapping[str, Sampler] = {
    "penalties": Sampler(
        "e", {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        lambda c, p, now: host.penalties(c, now.last(p.repeat_last_n), p.repeat_penalty,
                                         p.presence_penalty, p.frequency_penalty)),
    "dry": Sampler(
        "d", {"dry_multiplier": 0.0},
        lambda c, p, now: host.dry(c, now.last(p.dry_penalty_last_n), p.dry_multiplier, p.dry_base,
                                   p.dry_allowed_length, p.dry_breakers)),
    "top_n_sigma": Sampler("s", {"top_n_sigma": -1.0},
                           lambda c, p, now: host.top_n_sigma(c, p.top_n_sigma)),
    "top_k": Sampler("k", {"top_k": 0}, lambda c, p, now: ordered(c, p.top_k)),
    "typ_p": Sampler("y", {"typical": 1.0}, lambda c, p, now: typical(ordered(c), p.typical)),
    "top_p": Sampler("p", {"top_p": 1.0}, lambda c, p, now: top_p(ordered(c), p.top_p)),
    "min_p": Sampler("m", {"min_p": 0.0}, lambda c, p, now: min_p(ordered(c), p.min_p)),
    "xtc": Sampler(
        "x", {"xtc_probability": 0.0},
        lambda c, p, now: host.xtc(ordered(c), p.xtc_probability, p.xtc_threshold, now.chance)),
    "temperature": Sampler(
        "t", {"temp": 1.0, "dynatemp_range": 0.0},
        lambda c, p, now: host.dynamic_temperature(ordered(c), p.temp, p.dynatemp_range,
                                                   p.dynatemp_exp)),
}
DEVICE = ("penalties", "top_k", "typ_p", "top_p", "min_p", "temperature")
GREEDY = {"top_n_sigma", "top_k", "top_p", "min_p", "temperature"}  # the likeliest survives them
OTHER_NAMES = {"typical": "typ_p", "typical_p": "typ_p", "typ": "typ_p", "nucleus": "top_p",
               "temp": "temperature"}
ADAPTIVE = "adaptive_p"  # no part of the chain but what draws at its end; its letter is a


@dataclass(frozen=True)
class SamplingParams:
    """llama.cpp's names and defaults. `seed` None draws one; `logit_bias` maps ids to additions.

    `dry_breakers` are the `dry_sequence_breakers` as tokens (`text/breakers.py`), `thinking` the
    tokens that begin and end what `reasoning_budget` limits; these are what counts here.
    """

    temp: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exp: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    dry_breakers: host.Breakers = field(default_factory=dict, repr=False)
    mirostat: int = 0
    mirostat_ent: float = 5.0
    mirostat_lr: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: tuple[str, ...] = tuple(SAMPLERS)
    reasoning_budget: int = -1
    thinking: tuple[int, int] | None = field(default=None, repr=False)
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is float and not (isinstance(value, int | float) and np.isfinite(value)):
                raise LlamaGraphError(f"{f.name} is {value}; it must be a number")
            if f.type is int and not (isinstance(value, int) and -1 <= value < 1 << 31):
                raise LlamaGraphError(f"{f.name} is {value}; it must be a whole number below 2^31")
        if self.seed is not None and not isinstance(self.seed, int):
            raise LlamaGraphError(f"seed is {self.seed}; it must be a whole number")
        if self.repeat_penalty <= 0:
            raise LlamaGraphError(f"repeat_penalty is {self.repeat_penalty}; it must be above 0")
        if self.mirostat not in (0, 1, 2):
            raise LlamaGraphError(f"mirostat is {self.mirostat}; it must be 0 (off), 1 or 2")
        if self.adaptive_target > 1 or not 0 <= self.adaptive_decay <= 0.99:
            raise LlamaGraphError(f"adaptive_target is {self.adaptive_target}, adaptive_decay "
                                  f"{self.adaptive_decay}; they must be at most 1 and 0 to 0.99")
        if len(self.logit_bias) > MAX_BIAS:
            raise LlamaGraphError(f"{len(self.logit_bias)} logit biases; {MAX_BIAS} are possible")
        object.__setattr__(self, "samplers", read_samplers(self.samplers))

    def seeded(self) -> "SamplingParams":
        """The same with a seed: its own, or a random one."""
        if self.seed is not None and self.seed >= 0:
            return self
        return replace(self, seed=secrets.randbits(32))

    def chain(self) -> "SamplingParams":
        """The same with the samplers that do something, the others off.

        Mirostat takes the place of all but the temperature (llama.cpp's rule).
        """
        named = ["temperature"] if self.mirostat else [n for n in self.samplers if n != ADAPTIVE]
        off: dict[str, Any] = {}
        for name, s in SAMPLERS.items():
            off |= {} if name in named else s.off
        active = [name for name in named
                  if any(getattr(self, k) != v for k, v in SAMPLERS[name].off.items())]
        return replace(self, **off, samplers=tuple(active))

    def continued(self) -> "SamplingParams":
        """The same with another seed, for positions that have been drawn for already."""
        assert self.seed is not None
        return replace(self, seed=(self.seed + CONTINUED) & 0xFFFFFFFFFFFFFFFF)

    def sampler(self, target: Target, n_vocab: int) -> str:
        """The sampler of the StepKey: greedy where nothing but a bias can change the order.

        A chain is for the device where its own order gives the same.
        """
        p = self.chain()
        plain = p.mirostat == 0 and p.adaptive_target < 0 and p.dynatemp_range <= 0
        plain = plain and p.thinking is None
        if plain and p.temp <= 0 and set(p.samplers) <= GREEDY:
            return "greedy"
        in_order = [name for name in DEVICE if name in p.samplers] == list(p.samplers)
        fits = not target.is_cuda or device_can(p, n_vocab)
        return "chain" if plain and in_order and fits else "host"

    def write(self, memory: Memory, io: Mapping[str, Buffer]) -> None:
        """Puts the parameters into the `io` arena."""
        assert self.seed is not None
        p = self.chain()
        seed = np.array([self.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32)
        ints = {"seed_low": seed[0], "seed_high": seed[1], "n_bias": len(p.logit_bias)}
        values = [ints.get(n, getattr(p, n, None)) for n in SAMPLER_INTS]
        memory.write(io["sampler_ints"], np.array(values, np.int32))
        floats = [getattr(p, n) for n in SAMPLER_FLOATS]
        memory.write(io["sampler_floats"], np.array(floats, np.float32))
        if p.logit_bias:
            ids, bias = zip(*sorted(p.logit_bias.items()), strict=True)
            memory.write(io["bias_ids"], np.array(ids, np.int32))
            memory.write(io["bias_values"], np.clip(np.array(bias, np.float32), BANNED, -BANNED))


def read_samplers(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """An order of samplers by name, as in "top_k;temperature" (LlamaGraphError for others)."""
    given = [n for n in names.split(";") if n] if isinstance(names, str) else names
    read = [n.strip().lower().replace("-", "_") for n in given]
    read = [OTHER_NAMES.get(n, n) for n in read]
    for name in read:
        if name not in SAMPLERS and name != ADAPTIVE:
            raise LlamaGraphError(f"there is no sampler {name!r}; there are "
                                  f"{', '.join(SAMPLERS)}, {ADAPTIVE}")
    return tuple(read)


def read_letters(letters: str) -> tuple[str, ...]:
    """An order of samplers by letter, as in "edskypmxt" (LlamaGraphError for others)."""
    names = {s.letter: name for name, s in SAMPLERS.items()} | {"a": ADAPTIVE}
    if wrong := [letter for letter in letters if letter not in names]:
        raise LlamaGraphError(f"there is no sampler with the letter {wrong[0]!r}; there are "
                              + ", ".join(f"{k} ({v})" for k, v in names.items()))
    return tuple(names[letter] for letter in letters)


FILE_KEYS: Mapping[str, tuple[str, type]] = {  # of general.sampling: a field, and its type
    "sequence": ("samplers", str),
    **{name: (name, float) for name in ("top_p", "min_p", "xtc_probability", "xtc_threshold",
                                        "temp")},
    "top_k": ("top_k", int), "penalty_last_n": ("repeat_last_n", int),
    "penalty_repeat": ("repeat_penalty", float), "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_ent", float), "mirostat_eta": ("mirostat_lr", float),
}


def file_defaults(metadata: Any) -> dict[str, Any]:
    """The parameters that a model's file recommends by its `general.sampling.*` keys."""
    found = {}
    for key, (name, kind) in FILE_KEYS.items():
        value = metadata.scalar(f"general.sampling.{key}", kind, None)
        if value is not None:
            found[name] = value
    try:
        SamplingParams(**found)
    except LlamaGraphError as error:
        raise FormatError(f"{metadata.path}: general.sampling: {error}") from None
    return found
