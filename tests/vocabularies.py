"""Small tokenizers, made of a few tokens, for the tests of `llamagraph.text`."""

import numpy as np
from hypothesis import strategies as st

from llamagraph.text import Tokenizer
from llamagraph.text.merging import byte_signs

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

ANY_TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n'aA1.<|>▁é世🌍")
)


def bpe(special=None, joins=(), **keys):
    """A byte-level tokenizer: 256 bytes, what `joins` make, and `special`, a {text: type}."""
    signs = [sign for _, sign in sorted(byte_signs().items())]
    joined = [join.replace(" ", "") for join in joins]
    special = special or {}
    kinds = [NORMAL] * (len(signs) + len(joined)) + list(special.values())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": signs + joined + list(special),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": list(joins),
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    return Tokenizer({k: v for k, v in metadata.items() if v is not None}, "m.gguf")


def spm(tokens, **keys):
    """An SPM tokenizer of {text: (type, score)} and the 256 bytes."""
    rows = {"<unk>": (UNKNOWN, 0.0), "<s>": (CONTROL, 0.0), "</s>": (CONTROL, 0.0)}
    rows |= {f"<0x{byte:02X}>": (BYTE, 0.0) for byte in range(256)} | tokens
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(rows),
        "tokenizer.ggml.token_type": np.array([kind for kind, _ in rows.values()], np.int32),
        "tokenizer.ggml.scores": np.array([score for _, score in rows.values()], np.float32),
    }
    metadata.update({key.replace("__", "."): value for key, value in keys.items()})
    return Tokenizer(metadata, "m.gguf")


def texts(tokenizer, ids):
    return [tokenizer.token_text(token) for token in ids]
