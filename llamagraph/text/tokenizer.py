"""Text to tokens and back, exactly as llama.cpp does it, from nothing but a file's metadata.

Special tokens are cut out of the text first; the rest is BPE or SPM (merging.py). Does not know
what a conversation looks like (templates.py), what a model is, or where the metadata came from.
"""

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LlamaGraphError
from .merging import BytePairs, ScoredPieces, utf8
from .trie import TokenTrie
from .vocabulary import Keys, Kind, read_vocabulary

if TYPE_CHECKING:
    from .templates import ChatTemplates

_C_WHITE_SPACE = " \t\n\v\f\r"
_RAW_TEXT = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder:
    """Tokens to text as they come: a character comes out when its last byte is there, never half.

    Bytes that are no UTF-8 become U+FFFD, as in `Tokenizer.decode`.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that `token` completes, often none."""
        piece = self._token_bytes(token)
        if self._strip_space:
            piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What an unfinished character leaves: U+FFFD or nothing. The decoder starts afresh."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class Tokenizer:
    """The tokenizer of one model file.

    `metadata` holds the file's keys (lists of strings, numpy arrays, numbers, strings), `source`
    names the file in errors. Raises FormatError for keys that are missing, wrong or not supported.
    `warnings` are lines that a caller may show.
    """

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        keys = Keys(metadata, source)
        self.vocabulary = vocabulary = read_vocabulary(keys)
        self.warnings = vocabulary.warnings
        self.eog = vocabulary.eog
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.n_vocab = len(vocabulary.tokens)
        self._metadata, self._source = metadata, source
        is_spm = vocabulary.model == "llama"
        self._add_space_prefix = is_spm and bool(keys.get("add_space_prefix", bool, True))
        self._model: BytePairs | ScoredPieces
        if is_spm:
            self._model = ScoredPieces(vocabulary, self._add_space_prefix)
        else:
            needs_merges = vocabulary.pre != "kimi-k2" or "tokenizer.ggml.merges" in metadata
            self._model = BytePairs(vocabulary, keys.texts("merges") if needs_merges else [])

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The tokens of `text`.

        `add_special` adds BOS and EOS where the model wants them. `parse_special` takes the text
        of a control token as that token; user-defined tokens are always taken. Lone surrogates
        become U+FFFD.
        """
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        ids += self._encode_parts(text, parse_special, True)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _encode_parts(self, text: str, parse_special: bool, after_special: bool) -> list[int]:
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for part in self._cut_out_special(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._model.encode(part, after_special))
            after_special = isinstance(part, int)
        return ids

    def encode_chat(self, prompt: str) -> list[int]:
        """The tokens of a rendered conversation: special tokens parsed, BOS once, no EOS."""
        ids = self.encode(prompt, add_special=False)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_after(self, before: Sequence[int], text: str) -> list[int]:
        """The tokens of text that follows others: special tokens parsed, no BOS and no EOS."""
        special = not before or int(self.vocabulary.kinds[before[-1]]) in _RAW_TEXT
        return self._encode_parts(text, True, special)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are no UTF-8 become U+FFFD.

        The space that `encode` put before the first word of an SPM text is taken away again.
        """
        decoder = self.decoder(at_start=True, special=True)
        return "".join(map(decoder.feed, ids)) + decoder.flush()

    def decoder(self, at_start: bool = False, special: bool = False) -> IncrementalDecoder:
        """A decoder for tokens that come one by one, as the continuation of a text.

        Control tokens leave no text. With `at_start` it begins a text and with `special` control
        tokens are text too, as in `decode`.
        """
        token_bytes = self.token_bytes if special else self._shown_bytes
        return IncrementalDecoder(token_bytes, at_start and self._add_space_prefix)

    def token_text(self, token: int) -> str:
        """The token as the file writes it: with signs for bytes, or U+2581 for spaces."""
        if not 0 <= token < self.n_vocab:
            raise LlamaGraphError(
                f"{self._source}: there is no token {token}; they go from 0 to {self.n_vocab - 1}"
            )
        return self.vocabulary.tokens[token]

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text; nothing for unused tokens."""
        text = self.token_text(token)
        kind = int(self.vocabulary.kinds[token])  # numpy compares with an enum at 10 us a time
        if kind in _RAW_TEXT:
            return utf8(text)
        if kind == Kind.NORMAL:
            return self._model.bytes_of(text)
        if kind == Kind.BYTE and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(byte[1])
        return b""

    def _shown_bytes(self, token: int) -> bytes:
        text = self.token_bytes(token)
        hidden = int(self.vocabulary.kinds[token]) in (Kind.UNKNOWN, Kind.CONTROL)
        return b"" if hidden else text

    def single_token(self, text: str) -> int | None:
        """The one token that the text is, special or not; None where it takes several."""
        ids = self.encode(text, add_special=False)
        return ids[0] if len(ids) == 1 else None

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generated text."""
        return token in self.eog

    def thinking_tags(self) -> tuple[int, int] | None:
        """The tokens that begin and end thinking, where the vocabulary has such."""
        ids = self.vocabulary.ids
        return next(((ids[a], ids[b]) for a, b in THINKING if a in ids and b in ids), None)

    @functools.cached_property
    def trie(self) -> TokenTrie:
        """What a reader sees of all tokens, as a tree of bytes."""
        real = ~np.isin(self.vocabulary.kinds, (Kind.UNDEFINED, Kind.UNUSED))
        return TokenTrie(list(map(self._shown_bytes, range(self.n_vocab))), real, self.eog)

    @functools.cached_property
    def _special(self) -> dict[str, list[tuple[int, str, int]]]:
        """(order, text, id) of each token that is cut out of a text, by its first three characters.

        Longer tokens come first. The prefixes are for speed: Gemma has 6400 such tokens.
        """
        kinds, tokens = self.vocabulary.kinds, self.vocabulary.tokens
        found = np.flatnonzero(np.isin(kinds, _RAW_TEXT)).tolist()
        found.sort(key=lambda token: -len(utf8(tokens[token])))
        by_prefix: dict[str, list[tuple[int, str, int]]] = {}
        for order, token in enumerate(found):
            text = tokens[token]
            by_prefix.setdefault(text[:3], []).append((order, text, token))
        return by_prefix

    def _cut_out_special(self, text: str, parse_special: bool) -> list[str | int]:
        """The text with each special token replaced by its id, one token after another."""
        parts: list[str | int] = [text] if text else []
        near = [group for prefix, group in self._special.items() if prefix in text]
        for _, special, token in sorted(entry for group in near for entry in group):
            user_defined = self.vocabulary.kinds[token] == Kind.USER_DEFINED
            if special in text and (parse_special or user_defined):
                parts = [piece for part in parts for piece in self._cut(part, special, token)]
        return parts

    def _cut(self, part: str | int, special: str, token: int) -> Iterable[str | int]:
        if isinstance(part, int):
            yield part
            return
        strips = self.vocabulary.strips_right and special not in ("<unk>", "<s>", "<|endoftext|>")
        for i, text in enumerate(part.split(special)):
            if i:
                yield token
                text = text.lstrip(_C_WHITE_SPACE) if strips else text
            if text:
                yield text

    @functools.cached_property
    def _templates(self) -> "ChatTemplates":
        # Imported here: jinja2 takes as long to import as a vocabulary takes to read.
        from .templates import ChatTemplates

        names = [
            "" if token is None else self.vocabulary.tokens[token]
            for token in (self.bos_id, self.eos_id)
        ]
        return ChatTemplates(self._metadata, self._source, *names)

    @property
    def has_chat_template(self) -> bool:
        """Whether the file has a template of its own."""
        return "tokenizer.chat_template" in self._metadata

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation; give it to `encode_chat`.

        `messages` are dicts with `role` and `content`. `chat_template` is the text of a template
        or the name of one of the file's; without it the file's own is taken, or "chatml".
        `variables` are for the template and win over what it is given otherwise. Raises
        LlamaGraphError for a template that is broken, refuses the messages, or does too much.
        """
        return self._templates.render(messages, chat_template, add_generation_prompt, variables)
