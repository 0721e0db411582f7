"""What a file says of its tokens, what is corrected, and what is refused in one line."""

import numpy as np
import pytest
from vocabularies import CONTROL, NORMAL, USER_DEFINED, bpe, spm, texts

from llamagraph.errors import FormatError, LlamaGraphError


def test_texts_that_end_a_text_are_control_and_end_of_generation_whatever_the_file_says():
    tokenizer = bpe({"</s>": NORMAL, "<|im_end|>": USER_DEFINED, "<|fim_pad|>": NORMAL})
    assert texts(tokenizer, sorted(tokenizer.eog)) == [
        *texts(tokenizer, [tokenizer.eos_id]), "</s>", "<|im_end|>", "<|fim_pad|>"
    ]  # fmt: skip
    assert len(tokenizer.encode("</s>", parse_special=False)) == 4
    assert tokenizer.is_eog(256) and not tokenizer.is_eog(0)


def test_eot_of_the_file_ends_a_text():
    assert 256 in bpe({"<x>": CONTROL}, eot_token_id=256).eog


def test_gpt_oss_does_not_end_at_end():
    tokenizer = bpe(dict.fromkeys(("<|end|>", "<|return|>", "<|call|>"), CONTROL))
    assert 256 not in tokenizer.eog and {257, 258} <= tokenizer.eog
    assert tokenizer.encode("<|end|>", parse_special=False) == [256]
    assert 256 in bpe({"<|end|>": CONTROL}).eog


def test_gemma4_does_not_end_at_s():
    tokenizer = bpe({"<|tool_response>": CONTROL, "</s>": CONTROL})
    assert 256 in tokenizer.eog and 257 not in tokenizer.eog


def test_defaults_of_the_families():
    assert not bpe().add_bos and bpe(pre="llama-bpe").add_bos and bpe(pre="tekken").add_bos
    assert spm({}).add_bos and (spm({}).bos_id, spm({}).eos_id) == (1, 2)
    assert bpe(pre="glm4").bos_id is None and bpe(pre="gemma4", bos_token_id=3).add_bos


def test_empty_tokens_get_a_name():
    tokenizer = bpe({"": NORMAL})
    assert tokenizer.token_text(256) == "[EMPTY_256]"


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "none", "no_vocab", None])
def test_other_tokenizers_are_refused_by_name(model):
    with pytest.raises(FormatError, match=r"m.gguf: .*; supported: gpt2") as error:
        bpe(model=model)
    assert model is None or repr(model) in str(error.value)


def test_an_unknown_pretokenizer_is_refused_by_name():
    with pytest.raises(FormatError, match=r"m.gguf: tokenizer.ggml.pre is 'next-big-thing'"):
        bpe(pre="next-big-thing")


def test_a_missing_pretokenizer_is_the_default_with_a_warning():
    tokenizer = bpe(pre=None)
    assert tokenizer.vocabulary.pre == "default" and "tokenizer.ggml.pre" in tokenizer.warnings[0]
    assert not bpe().warnings


@pytest.mark.parametrize(
    "keys, complaint",
    [
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": np.arange(3)}, "tokens is of type ndarray, but must be of type list"),
        ({"tokens": ["a", "b", "a"]}, "holds 'a' twice, as tokens 0 and 2"),
        ({"tokens": ["a", 1]}, "must hold texts only"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"token_type": np.arange(3)}, "token_type must be an array of 256 numbers"),
        ({"token_type": ["a"] * 256}, "token_type must be an array of 256 numbers"),
        ({"token_type": np.full(256, np.nan)}, "token_type must be an array of 256 numbers"),
        ({"scores": np.zeros(3)}, "scores must be an array of 256 numbers"),
        ({"scores": 1.0}, "scores must be an array of 256 numbers"),
        ({"pre": 3}, "tokenizer.ggml.pre is of type int, but must be of type str"),
        ({"model": 3}, "tokenizer.ggml.model is of type int, but must be of type str"),
        ({"bos_token_id": "1"}, "bos_token_id is of type str, but must be of type int"),
        ({"add_bos_token": 1}, "add_bos_token is of type int, but must be of type bool"),
        ({"add_bos_token": True, "pre": "glm4"}, "bos_token_id is missing"),
    ],
)
def test_a_wrong_key_is_named_in_one_line(keys, complaint):
    with pytest.raises(FormatError) as error:
        bpe(**keys)
    message = str(error.value)
    assert complaint in message and message.startswith("m.gguf: ") and "\n" not in message


def test_ids_outside_the_vocabulary():
    tokenizer = bpe(bos_token_id=99999, eot_token_id=-1)
    assert tokenizer.bos_id == 11 and len(tokenizer.warnings) == 2
    for token in (-1, 256):
        with pytest.raises(LlamaGraphError, match=r"m.gguf: there is no token"):
            tokenizer.decode([token])
