"""What a GGUF file says of its tokens: texts, kinds, scores, special ids and what ends a text.

Files are often wrong about special tokens, so llama.cpp corrects them by their texts, and so does
this module, in the same way. Does not know how text is cut into tokens (tokenizer.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from ..errors import FormatError
from .pretokenizers import ADDS_BOS, PRETOKENIZERS

T = TypeVar("T")

SUPPORTED = ("gpt2 (BPE)", "gemma4 (BPE)", "llama (SPM)")
_MODELS = ("gpt2", "gemma4", "llama")

# Tokens that end a text by what they say, in whatever family; they are control tokens too.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip

# Fill-in-the-middle tokens: where no key names one, the first of these texts that is a token is
# a control token; those of the last three rows end a text as well.
_FIM: tuple[tuple[tuple[str, ...], tuple[str, ...], bool], ...] = (
    (("fim_pre", "prefix"), (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
        "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"), False),
    (("fim_suf", "suffix"), (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
        "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"), False),
    (("fim_mid", "middle"), (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
        "\u2581<MID>", "<|code_middle|>", "<|middle|>"), False),
    (("fim_pad",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), True),
    (("fim_rep",), (
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), True),
    (("fim_sep",), ("<|file_sep|>",), True),
)  # fmt: skip

# gpt-oss writes its channels with these: they are text that a reader sees, not control.
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Kind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Keys:
    """The metadata of one file, read with the type that is expected or refused in one line."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata, self.source = metadata, source

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """`tokenizer.ggml.<key>`, which is a `kind` or missing."""
        value = self.metadata.get(name := f"tokenizer.ggml.{key}", default)
        if value is not default and type(value) is not kind:
            raise FormatError(
                f"{self.source}: {name} is of type {type(value).__name__}, "
                f"but must be of type {kind.__name__}"
            )
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, which must be there."""
        value = self.get(key, list)
        if value is None:
            raise FormatError(f"{self.source}: tokenizer.ggml.{key} is missing; convert it again")
        if not set(map(type, value)) <= {str}:
            raise FormatError(f"{self.source}: tokenizer.ggml.{key} must hold texts only")
        return value

    def numbers(self, key: str, n: int, default: float) -> np.ndarray:
        """An array of at least n numbers, cut to n; n times `default` where there is none.

        Where the default is a whole number the array must hold whole numbers too.
        """
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return np.full(n, default)
        array = np.asarray(value)
        kinds = "iu" if isinstance(default, int) else "iuf"
        if array.ndim != 1 or array.dtype.kind not in kinds or len(array) < n:
            raise FormatError(
                f"{self.source}: tokenizer.ggml.{key} must be an array of {n} numbers, one a token"
            )
        return array[:n]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and all that is known of each; `kinds` (n_vocab,) of Kind, `scores` n_vocab floats."""

    source: str
    model: str
    pre: str
    tokens: list[str]
    ids: dict[str, int]
    kinds: np.ndarray
    scores: list[float]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    eog: frozenset[int]
    strips_right: bool  # special tokens swallow the white space after them (Phi-3)
    warnings: list[str]


def read_vocabulary(keys: Keys) -> Vocabulary:
    """The vocabulary of a file. Raises FormatError for what is missing, wrong or not supported."""
    model, pre, warnings = _read_family(keys)
    tokens, ids = _read_tokens(keys)
    kinds = keys.numbers("token_type", len(tokens), Kind.NORMAL).astype(np.int8)
    default_bos, default_eos = {"gpt2": (11, 11), "llama": (1, 2)}.get(model, (None, None))
    if pre in ("glm4", "chatglm-bpe"):
        default_bos = None
    bos_id = _special_id(keys, "bos", default_bos, len(tokens), warnings)
    eos_id = _special_id(keys, "eos", default_eos, len(tokens), warnings)
    add_bos = keys.get("add_bos_token", bool, model == "llama" or pre in ADDS_BOS)
    add_eos = keys.get("add_eos_token", bool, False)
    add_bos = add_bos or pre == "gemma4"
    for name, wanted, token in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
        if wanted and token is None:
            raise FormatError(
                f"{keys.source}: tokenizer.ggml.add_{name}_token is true, but "
                f"tokenizer.ggml.{name}_token_id is missing"
            )
    eog = _find_ends(keys, ids, kinds, eos_id, warnings)
    name = str(keys.metadata.get("general.name", "")).lower()
    return Vocabulary(
        source=keys.source, model=model, pre=pre, tokens=tokens, ids=ids, kinds=kinds,
        scores=keys.numbers("scores", len(tokens), 0.0).tolist(),
        bos_id=bos_id, eos_id=eos_id, add_bos=bool(add_bos), add_eos=bool(add_eos), eog=eog,
        strips_right="phi-3" in name or "phi3" in name, warnings=warnings,
    )  # fmt: skip


def _read_family(keys: Keys) -> tuple[str, str, list[str]]:
    """`tokenizer.ggml.model`, the name of its pre-tokenizer ("" for SPM), and warnings."""
    model = keys.get("model", str)
    if model not in _MODELS:
        found = "is missing" if model is None else f"is {model[:40]!r}, which is not supported"
        raise FormatError(
            f"{keys.source}: tokenizer.ggml.model {found}; supported: {', '.join(SUPPORTED)}"
        )
    if model == "llama":
        return model, "", []
    pre = "gemma4" if model == "gemma4" else keys.get("pre", str)
    if not pre:
        return model, "default", [f"{keys.source}: tokenizer.ggml.pre is missing, taking 'default'"]
    if pre not in PRETOKENIZERS:
        raise FormatError(
            f"{keys.source}: tokenizer.ggml.pre is {pre[:40]!r}, which is not supported; "
            f"supported: {', '.join(sorted(PRETOKENIZERS))}"
        )
    return model, pre, []


def _read_tokens(keys: Keys) -> tuple[list[str], dict[str, int]]:
    tokens = keys.texts("tokens")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if "" in ids:
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        first = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise FormatError(
            f"{keys.source}: tokenizer.ggml.tokens holds {tokens[first][:40]!r} twice, as tokens "
            f"{first} and {ids[tokens[first]]}"
        )
    return tokens, ids


def _special_id(
    keys: Keys, name: str, default: int | None, n_vocab: int, warnings: list[str]
) -> int | None:
    """`<name>_token_id` where it is one of the n_vocab tokens, else `default` where that is."""
    found = keys.get(f"{name}_token_id", int, default)
    if found is None or 0 <= found < n_vocab:
        return found
    if found != default:
        warnings.append(
            f"{keys.source}: tokenizer.ggml.{name}_token_id is {found}, but there are only "
            f"{n_vocab} tokens; ignored"
        )
    return default if default is not None and default < n_vocab else None


def _find_ends(
    keys: Keys, ids: dict[str, int], kinds: np.ndarray, eos_id: int | None, warnings: list[str]
) -> frozenset[int]:
    """The end-of-generation tokens; corrects `kinds` in place where a token's text says better."""
    n_vocab = len(kinds)
    ends = {ids[text] for text in _ENDS if text in ids}
    kinds[list(ends)] = Kind.CONTROL
    for names, texts, ends_text in _FIM:
        given = [_special_id(keys, name, None, n_vocab, warnings) for name in names]
        found = next((token for token in given if token is not None), None)
        if found is None and (text := next((t for t in texts if t in ids), None)):
            found = ids[text]
            kinds[found] = Kind.CONTROL
        if found is not None and ends_text:
            ends.add(found)
    for text in _ALWAYS_SHOWN:
        if text in ids:
            kinds[ids[text]] = Kind.USER_DEFINED
    named = [_special_id(keys, name, None, n_vocab, warnings) for name in ("eot", "eom")]
    ends.update(token for token in (eos_id, *named) if token is not None)
    _take_back(ids, kinds, ends)
    return frozenset(ends)


def _take_back(ids: dict[str, int], kinds: np.ndarray, ends: set[int]) -> None:
    """Tokens that end a text in most families but not in these two."""
    have = {text for text in _ENDS if text in ids}
    calls = {"<|call|>", "<|calls|>"} & have
    if "<|end|>" in have and calls and {"<|return|>", "<|flush|>"} & have:
        ends.discard(ids["<|end|>"])
        kinds[ids["<|end|>"]] = Kind.USER_DEFINED
    if {"<|tool_response>", "</s>"} <= have:
        ends.discard(ids["</s>"])
        kinds[ids["</s>"]] = Kind.NORMAL
