"""Thinking is split from what is said, however its tags are cut into tokens."""

import pytest
from vocabularies import CONTROL, USER_DEFINED, bpe

from llamagraph.text.thinking import ThinkingText


def split(parts, prompt="", tokenizer=None):
    """What the parts of an answer, as tokens that have no tag of their own, are split into."""
    tokenizer = tokenizer or bpe()
    thinking = ThinkingText(tokenizer, tokenizer.encode(prompt))
    pieces = [piece for part in parts for piece in thinking.feed(0, part)] + thinking.flush()
    return tuple("".join(p.text for p in pieces if p.thinking == which) for which in (True, False))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("answer, found", [
    ("<think>\nLet me see.\n</think>\n\nYes.", ("Let me see.\n", "Yes.")),
    ("\n<think>a < b</thin</think>Yes\n\n", ("a < b</thin", "Yes\n\n")),
    ("[THINK]so[/THINK]Yes", ("so", "Yes")),
    ("Yes, <think> is a tag.</think>", ("", "Yes, <think> is a tag.</think>")),
    ("<thing>", ("", "<thing>")),
    ("<think>for ever", ("for ever", "")),
    ("<thi", ("", "<thi")),
    ("  Yes", ("", "  Yes")),
    ("<think></think>", ("", "")),
    ("", ("", "")),
])
def test_parts_of_every_size(answer, found, size):
    assert split([answer[i : i + size] for i in range(0, len(answer), size)]) == found


def test_a_prompt_may_begin_it():
    assert split(["so", "</think>", "\n", "\n", "Yes"], "<think>\n") == ("so", "Yes")
    assert split(["Yes"], "<think>\n\n</think>\n\n") == ("", "Yes")


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_tags_that_are_tokens_count_also_where_they_show_no_text(kind):
    tokenizer = bpe({"<think>": kind, "</think>": kind})
    thinking, decoder = ThinkingText(tokenizer, []), tokenizer.decoder()
    pieces = []
    for token in tokenizer.encode("<think>so</think>Yes"):
        pieces += thinking.feed(token, decoder.feed(token))
    assert ["".join(p.text for p in pieces if p.thinking == which) for which in (True, False)] == [
        "so", "Yes"]
    assert thinking.n_tokens == 4
