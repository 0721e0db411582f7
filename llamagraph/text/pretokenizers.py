r"""How the families of BPE tokenizers cut text into words: `tokenizer.ggml.pre` to expressions.

The expressions of a family are applied one after another, each to the pieces that the one before
left; what none matches stays as a piece of its own. They say what llama.cpp does, which is not
always what a model's own tokenizer.json says. Where the two differ the comment at the expression
tells; the differences come from how llama.cpp runs them: it knows the Unicode categories L, N, P,
S, M only as wholes (no Lu, Ll), and does not count `~` among S.

Knows nothing of vocabularies, merges or files. Expressions are for the `regex` module with its
version 1 set syntax.
"""

from collections.abc import Mapping
from types import MappingProxyType

import regex

_CONTRACTION = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(letters: str, numbers: str, signs_end: str = r"[\r\n]*") -> str:
    """The expressions that began with GPT-4: a word takes one sign before it along."""
    marks = r"\p{M}" if r"\p{M}" in letters else ""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{numbers}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+{signs_end}|{_SPACES}"
    )


def _cased_words(contraction: str, numbers: str) -> str:
    """Words that also end before a capital. Any letter outside ASCII counts as either case."""
    upper, lower = r"[\p{L}--[a-z]]", r"[\p{L}--[A-Z]]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_WORD = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT2 = (_WORD,)
_STARCODER = (r"\p{N}", _WORD)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _WORD, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _WORD, r"\p{N}+", r"[0-9][0-9][0-9]")
_LLAMA3 = (_words(r"\p{L}+", r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{L}+", r"\p{N}"),)
_QWEN35 = (_words(r"[\p{L}\p{M}]+", r"\p{N}"),)
_GPT4O = (_cased_words(rf"(?:{_CONTRACTION})?", r"\p{N}{1,3}"),)
_TEKKEN = (_cased_words("", r"\p{N}"),)
_SEED_CODER = (_words(r"\p{L}+", r"\p{N}", signs_end=""),)
_BLOOM = (r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)

# The three DeepSeek families. White space is never part of their CJK and punctuation ranges.
_DEEPSEEK_CJK = r"[[\u0800-\u9fa5\uac00-\ud7ff]--\s]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    r"\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    r"\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    r"\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    r"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    r"\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    r"\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    r"\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    r"\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    r"\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+",
    r"\s?[!-/:-\~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
    r"\s+\Z",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_SIGNS = r"[\p{P}[\p{S}--\~]]"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"""[!"#$%\&'()*+,\-./:;<=>?@\[\\\]\^_`{|}\~][A-Za-z]+"""
    rf"|[^\r\n\p{{L}}{_SIGNS}]?[\p{{L}}\p{{M}}]+| ?{_SIGNS}+[\r\n]*|{_SPACES}",
)

# Runs of Chinese characters apart from all other words. llama.cpp tells them by block, not by the
# script property, and knows no case here.
_HAN = (
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef"
    r"\U0002f800-\U0002fa1f"
)
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}--[{_HAN}]]+(?:{_CONTRACTION})?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_LINES = (r"[^\n]+|\n+",)

_FAMILIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (_DEFAULT, "default"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 chatglm-bpe"),
    (_LLAMA3, "dbrx smaug-bpe"),
    (_QWEN2, "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2"),
    (_QWEN35, "qwen35"),
    (_SEED_CODER, "seed-coder"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2"),
    (_TEKKEN, "tekken"),
    (_GPT2, "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4"),
    (_STARCODER, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (_FALCON, "falcon"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_KIMI, "kimi-k2"),
    (_BLOOM, "bloom gpt3-finnish poro-chat"),
    ((*_BLOOM, r"\p{N}"), "viking"),
    (_LINES, "gemma4 sarvam-moe"),
)

PRETOKENIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: patterns for patterns, names in _FAMILIES for name in names.split()}
)

# Expressions that a real vocabulary of some family has confirmed, string by string.
_CONFIRMED = (_LLAMA3, _QWEN2, _GPT2, _STARCODER, _FALCON, _DEEPSEEK_CODER)
UNVERIFIED: tuple[str, ...] = tuple(
    name for name, patterns in PRETOKENIZERS.items() if patterns not in _CONFIRMED
)

# A word that is a token as it stands is taken whole, whatever the merges say.
IGNORES_MERGES = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
    + ("tekken",)
)
# BOS is added where the file does not say.
ADDS_BOS = IGNORES_MERGES
# Merges run over plain text with spaces as U+2581 and bytes as <0x41>, not over GPT-2's byte signs.
PLAIN_TEXT = frozenset(("gemma4", "sarvam-moe"))


class PreTokenizer:
    """The compiled expressions of one family; `split` cuts text into words, losing nothing."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = [regex.compile(pattern, regex.VERSION1) for pattern in patterns]

    def split(self, text: str) -> list[str]:
        """The words of `text` in order; joined they are `text` again."""
        pieces = [text]
        for pattern in self._patterns:
            pieces = [word for piece in pieces for word in _cut(pattern, piece)]
        return pieces


def _cut(pattern: "regex.Pattern[str]", text: str) -> list[str]:
    """Every match and every stretch between matches."""
    words, end = [], 0
    for match in pattern.finditer(text):
        if match.start() > end:
            words.append(text[end : match.start()])
        words.append(match[0])
        end = match.end()
    if end < len(text):
        words.append(text[end:])
    return words
