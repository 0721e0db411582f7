"""Tokenizers against llama.cpp's ids, and what holds for any text and any vocabulary."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import (
    ANY_TEXT,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    bpe,
    spm,
    texts,
)

from llamagraph.gguf.reader import GGUFFile
from llamagraph.text import Tokenizer
from llamagraph.text.merging import merge

HERE = Path(__file__).parent
GOLDEN_MODELS = {
    "smollm2": "smollm2-135m-q4_1",
    "gemma3": "gemma3-270m-q4_k_m",
    "qwen": "qwen2.5-coder-0.5b-q4_k_m",
}
VOCABULARIES = (
    ("deepseek-coder", "falcon", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "starcoder")
)


def load(path):
    with GGUFFile(path) as file:
        return Tokenizer(file.metadata, path.name)


def tiny(name):
    data = json.loads((HERE / "golden" / f"{name}.json").read_text("utf-8"))
    return data["metadata"], data["cases"]


TINY_BPE, BPE_CASES = tiny("tiny_bpe")
TINY_SPM, SPM_CASES = tiny("tiny_spm")


# Against llama.cpp


def check(tokenizer, case):
    columns = {
        "plain": tokenizer.encode(case["text"], add_special=False, parse_special=False),
        "special": tokenizer.encode(case["text"], add_special=False, parse_special=True),
        "bos": tokenizer.encode(case["text"], add_special=True, parse_special=True),
        "decode": tokenizer.decode(case.get("special", case["plain"])),
    }
    for column in columns.keys() & case.keys():
        assert columns[column] == case[column], (column, case["text"])


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_every_column_of_a_model_is_llama_cpps(name, golden, model_path):
    tokenizer = load(model_path(name))
    cases = json.loads((golden / f"tokenizer/{GOLDEN_MODELS[name]}.json").read_text("utf-8"))
    assert len(cases) == 524
    for case in cases:
        check(tokenizer, case)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_prompts_and_generated_texts_of_a_model_are_llama_cpps(name, golden, model_path):
    tokenizer = load(model_path(name))
    for case in json.loads((golden / f"{GOLDEN_MODELS[name]}.json").read_text("utf-8"))["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_tokens"]
        decoder = tokenizer.decoder()
        assert "".join(map(decoder.feed, case["tokens"])) + decoder.flush() == case["text"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_line_of_a_vocabulary_is_llama_cpps(name, golden):
    path = golden / f"vocab/ggml-vocab-{name}.gguf"
    tokenizer = load(path)
    inputs, outputs = (Path(f"{path}.{end}").read_bytes().decode() for end in ("inp", "out"))
    *given, last = inputs.split("\n__ggml_vocab_test__\n")
    lines = outputs.split("\n")[:-1]
    assert not last and len(given) == len(lines) == 46
    for text, line in zip(given, lines, strict=True):
        check(tokenizer, {"text": text, "plain": [int(token) for token in line.split()]})


@pytest.mark.parametrize("metadata, cases", [(TINY_BPE, BPE_CASES), (TINY_SPM, SPM_CASES)])
def test_the_committed_cases(metadata, cases):
    tokenizer = Tokenizer(metadata, "tiny.gguf")
    for case in cases:
        check(tokenizer, case)


# For any text

BPE = bpe(joins=["a a", "aa a", "Ġ a", "Ġ Ġ", "1 .", "Ã ©", "ð Ł", "ä ¸"], pre="smollm")
SPM = Tokenizer(TINY_SPM, "tiny.gguf")


@given(ANY_TEXT)
def test_bpe_gives_any_text_back(text):
    assert BPE.decode(BPE.encode(text, add_special=False, parse_special=False)) == text


@given(ANY_TEXT.filter(lambda text: "▁" not in text))
def test_spm_gives_any_text_back(text):
    assert SPM.decode(SPM.encode(text, add_special=False, parse_special=False)) == text


@given(st.sampled_from([BPE, SPM]), st.lists(st.integers(0, 255)))
def test_the_incremental_decoder_says_what_decode_says_in_whole_characters(tokenizer, ids):
    decoder = tokenizer.decoder(at_start=True, special=True)
    parts = [decoder.feed(token) for token in ids]
    assert "".join(parts) + decoder.flush() == tokenizer.decode(ids)


@given(ANY_TEXT)
def test_no_half_character_comes_out(text):
    decoder = BPE.decoder()
    out = ""
    for token in BPE.encode(text, add_special=False, parse_special=False):
        out += decoder.feed(token)
        assert text.startswith(out)
    assert out == text and not decoder.flush()


@given(st.text("abc", max_size=30), st.permutations([a + b for a in "abc" for b in "abc"]))
def test_merge_does_what_the_plain_algorithm_does(text, order):
    ranks = {pair: rank for rank, pair in enumerate(order[:6])}

    def rank(left, right):
        return ranks.get(left[-1] + right[0]) if len(left + right) < 6 else None

    plain = list(text)
    while pairs := [
        (found, i)
        for i in range(len(plain) - 1)
        if (found := rank(plain[i], plain[i + 1])) is not None
    ]:
        i = min(pairs)[1]
        plain[i : i + 2] = [plain[i] + plain[i + 1]]
    assert merge(list(text), rank) == plain


# Special tokens


def test_control_tokens_are_parsed_on_request_and_user_defined_ones_always():
    tokenizer = bpe({"<c>": CONTROL, "<u>": USER_DEFINED, "<?>": UNKNOWN})
    plain = tokenizer.encode("a<c><u><?>", parse_special=False)
    assert texts(tokenizer, plain) == ["a", "<", "c", ">", "<u>", "<", "?", ">"]
    assert texts(tokenizer, tokenizer.encode("a<c><u><?>")) == ["a", "<c>", "<u>", "<?>"]


def test_the_longer_special_token_comes_first_wherever_it_is():
    tokenizer = bpe({"ab": CONTROL, "bcd": CONTROL})
    assert texts(tokenizer, tokenizer.encode("abcdab")) == ["a", "bcd", "ab"]


def test_unused_tokens_have_no_text():
    tokenizer = bpe({"[x]": UNUSED})
    assert tokenizer.decode([256]) == ""
    assert 256 not in tokenizer.encode("[x]")


def test_control_tokens_are_left_out_of_shown_text():
    tokenizer = bpe({"<c>": CONTROL, "<u>": USER_DEFINED})
    ids = tokenizer.encode("a<c><u>")
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.feed, ids)) == "a<u>" and tokenizer.decode(ids) == "a<c><u>"


def test_phi3_special_tokens_swallow_the_white_space_after_them():
    tokens = {"<|user|>": (CONTROL, 0.0), "a": (NORMAL, 0.0), "▁": (NORMAL, 0.0)}
    keys = {"tokenizer__ggml__add_space_prefix": False}
    tokenizer = spm(tokens, general__name="Phi-3 mini", **keys)
    assert texts(tokenizer, tokenizer.encode("<|user|> \n a", False)) == ["<|user|>", "a"]
    assert texts(tokenizer, tokenizer.encode("<s> a", False)) == ["<s>", "▁", "a"]
    assert len(spm(tokens, **keys).encode("<|user|> a", False)) == 3


# BOS and EOS


def test_bos_and_eos_where_the_file_wants_them():
    tokenizer = bpe({"<b>": CONTROL, "<e>": CONTROL}, bos_token_id=256, eos_token_id=257,
                    add_bos_token=True, add_eos_token=True)  # fmt: skip
    assert texts(tokenizer, tokenizer.encode("a")) == ["<b>", "a", "<e>"]
    assert texts(tokenizer, tokenizer.encode("a", add_special=False)) == ["a"]


def test_a_conversation_begins_with_one_bos_and_has_no_eos():
    tokenizer = bpe({"<b>": CONTROL}, bos_token_id=256, add_bos_token=True, add_eos_token=True)
    assert texts(tokenizer, tokenizer.encode_chat("a")) == ["<b>", "a"]
    assert texts(tokenizer, tokenizer.encode_chat("<b>a")) == ["<b>", "a"]
    assert bpe({"<b>": CONTROL}, bos_token_id=256).encode_chat("<b>") == [256]


# BPE and SPM


def test_a_word_that_is_a_token_needs_no_merges_in_llama3():
    joins, tokens = ["a b"], {"abc": NORMAL}
    assert texts(*with_ids(bpe(tokens, joins), "abc")) == ["ab", "c"]
    assert texts(*with_ids(bpe(tokens, joins, pre="llama-bpe"), "abc"))[1:] == ["abc"]


def with_ids(tokenizer, text):
    return tokenizer, tokenizer.encode(text)


def test_of_two_equal_merges_the_first_counts():
    tokenizer = bpe(joins=["a b", "b c"])
    twice = dict(TINY_BPE) | {
        "tokenizer.ggml.tokens": tokenizer.vocabulary.tokens,
        "tokenizer.ggml.token_type": None,
        "tokenizer.ggml.merges": ["a b", "b c", "a b"],
    }
    assert texts(*with_ids(Tokenizer(twice, "m"), "abc")) == ["ab", "c"]


def test_gemma4_joins_plain_text_with_bytes_for_the_rest():
    tokens = {"▁": NORMAL, "\n\n": NORMAL}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in "世".encode()}
    tokenizer = bpe(tokens, ["▁ a"], model="gemma4", pre=None, bos_token_id=0)
    ids = tokenizer.encode("b a 世\n\n", add_special=False)
    assert texts(tokenizer, ids) == ["b", "▁a", "▁", "<0xE4>", "<0xB8>", "<0x96>", "\n\n"]
    assert tokenizer.decode(ids) == "b a 世\n\n"


def test_spm_joins_by_score_and_falls_back_on_bytes():
    scores = {"▁": -9.0, "a": -9.0, "b": -9.0, "ab": -2.0, "bb": -1.0, "▁a": -3.0}
    tokenizer = spm({text: (NORMAL, score) for text, score in scores.items()})
    assert texts(*with_ids(tokenizer, "abb")) == ["<s>", "▁a", "bb"]
    assert texts(*with_ids(tokenizer, "é")) == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é a", add_special=False)) == "é a"


def test_spm_puts_a_space_before_text_at_the_start_and_after_special_tokens():
    tokenizer = spm({"▁": (NORMAL, 0.0), "a": (NORMAL, 0.0)})
    assert texts(*with_ids(tokenizer, "a</s>a")) == ["<s>", "▁", "a", "</s>", "▁", "a"]
    bare = spm({"a": (NORMAL, 0.0)}, tokenizer__ggml__add_space_prefix=False)
    assert texts(*with_ids(bare, "a")) == ["<s>", "a"]


def test_a_continuation_keeps_its_space():
    tokenizer = spm({"▁a": (NORMAL, 0.0)})
    assert tokenizer.decode([259]) == "a" and tokenizer.decoder().feed(259) == " a"


def test_lone_surrogates_become_replacement_characters():
    assert BPE.decode(BPE.encode("a\ud800b\udc80")) == "a\ufffdb\ufffd"
    assert BPE.encode("\ufeffa") != BPE.encode("a")


def test_bytes_that_are_no_utf8_become_replacement_characters():
    ids = [BPE.vocabulary.ids[sign] for sign in ("à", "a")]  # the bytes E0 and 61
    decoder = BPE.decoder()
    assert BPE.decode(ids) == "\ufffda" and decoder.feed(ids[0]) == ""
    assert decoder.feed(ids[1]) == "\ufffda" and decoder.feed(ids[0]) == ""
    assert decoder.flush() == "\ufffd" and decoder.feed(ids[1]) == "a"


