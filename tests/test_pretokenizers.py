"""How text is cut into words, above all by families that no vocabulary here confirms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import ANY_TEXT

from llamagraph.text.pretokenizers import PRETOKENIZERS, UNVERIFIED, PreTokenizer


@given(st.sampled_from(sorted(PRETOKENIZERS)), ANY_TEXT)
def test_a_pretokenizer_loses_nothing(name, text):
    words = PreTokenizer(PRETOKENIZERS[name]).split(text)
    assert "".join(words) == text and all(words)


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("gpt-4o", "camelCase I'LL 12345", ["camel", "Case", " I'LL", " ", "123", "45"]),
        ("gpt-4o", "a/b\n/\n\nc", ["a", "/b", "\n", "/\n\n", "c"]),
        ("tekken", "XMLHttp don't 12", ["XMLHttp", " don", "'t", " ", "1", "2"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
        ("qwen2", "नमस्ते", ["नमस", "्त", "े"]),
        ("deepseek-v3", "x = 12345;\n漢カa", ["x", " =", " ", "123", "45", ";\n", "漢カ", "a"]),
        ("deepseek-llm", " Привет, 漢字 12", [" Привет", ",", " ", "漢字", " ", "12"]),
        ("kimi-k2", "漢字kana カナ's 1234", ["漢字", "kana", " カナ's", " ", "123", "4"]),
        ("default", "a1234 b!!", ["a", "123", "4", " b", "!!"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("glm4", "It'S 1234", ["It", "'S", " ", "123", "4"]),
        ("command-r", "It's 12", ["It", "'s", " ", "1", "2"]),
    ],
)
def test_words(name, text, words):
    assert PreTokenizer(PRETOKENIZERS[name]).split(text) == words


def test_the_families_that_must_be_there():
    names = "llama-bpe llama3 qwen2 qwen35 gpt-4o llama4 tekken deepseek-v3 deepseek-llm "
    names += "deepseek-coder deepseek-r1-qwen glm4 smollm gpt-2 default gemma4 refact lfm2 kimi-k2 "
    names += "minimax-m2 command-r phi-2 falcon starcoder"
    assert set(names.split()) <= set(PRETOKENIZERS)
    assert "tekken" in UNVERIFIED and "llama-bpe" not in UNVERIFIED
