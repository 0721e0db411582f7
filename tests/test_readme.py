"""The README's lists say what the code does."""

import re

from conftest import REPOSITORY

from llamagraph.execute import EXECUTORS
from llamagraph.models import architectures
from llamagraph.text.pretokenizers import UNVERIFIED


def paragraph(start: str) -> str:
    text = (REPOSITORY / "README.md").read_text()
    return next(p for p in text.split("\n\n") if p.startswith(start))


def names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_architectures():
    assert names(paragraph("Architectures:")) == set(architectures())


def test_unverified_pre_tokenizers():
    assert names(paragraph("Tokenizers:")) - {"tokenizer.ggml.pre"} == set(UNVERIFIED)


def test_graph_modes():
    rows = paragraph("| `--graph-mode`").splitlines()[2:]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows] == list(EXECUTORS)
