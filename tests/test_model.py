"""The Python face on tiny models: generation, stops, limits, errors."""

import numpy as np
import pytest
from plain_forward import PlainModel
from tiny import N_VOCAB, tiny_model

import llamagraph
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import FormatError, LlamaGraphError, MemoryLimitError
from llamagraph.model import StopText


@pytest.fixture
def model(tmp_path):
    with llamagraph.open(tiny_model(tmp_path / "m.gguf", n_ctx=128), device=CpuDevice()) as model:
        yield model


def test_generate_yields_ids_and_text(model):
    answer = model.generate("hello", limit=12, temp=0)
    tokens = list(answer)
    assert answer.text == "".join(text for _, text in tokens) == model.tokenizer.decode(
        [id for id, _ in tokens]
    )
    assert answer.tokens == [id for id, _ in tokens]
    assert answer.stop_reason in ("limit", "eog")


def test_the_same_seed_gives_the_same_answer(model):
    first, again, other = (list(model.generate("hello", limit=20, seed=s)) for s in (3, 3, 4))
    assert first == again != other


def test_logits_match_a_plain_forward_pass(model):
    tokens = [1, 2, 3, 4, 5]
    expected = PlainModel(model.path).logits(tokens)
    found = model.logits(tokens)
    assert found.shape == (5, N_VOCAB) and found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-3


def test_generation_ends_with_the_context(model):
    answer = model.generate([7] * 120, ignore_eos=True)
    assert len(list(answer)) == 9 and answer.stop_reason == "context"


def test_ignore_eos_never_chooses_an_end(model):
    answer = model.generate("hello", ignore_eos=True, temp=5, top_k=0, top_p=1, min_p=0, seed=1)
    assert not model.tokenizer.eog & {id for id, _ in answer}


def test_logprobs_are_kept_a_step(model):
    answer = model.generate("hello", limit=3, temp=0, logprobs=4, ignore_eos=True)
    tokens = [id for id, _ in answer]
    assert [len(step) for step in answer.logprobs] == [4, 4, 4]
    assert [step[0][0] for step in answer.logprobs] == tokens
    logits = PlainModel(model.path).logits(answer.prompt_tokens)[-1]
    expected = logits[tokens[0]] - np.log(np.exp(logits).sum())
    assert answer.logprobs[0][0][1] == pytest.approx(expected, abs=1e-3)


def test_a_stop_string_ends_the_answer_before_it(model):
    whole = model.generate("hello", limit=20, temp=0, ignore_eos=True)
    text = "".join(t for _, t in whole)
    stop = text[5:8]
    answer = model.generate("hello", limit=20, temp=0, ignore_eos=True, stop=[stop])
    assert "".join(t for _, t in answer) == text[: text.index(stop)]
    assert answer.stop_reason == "stop"


@pytest.mark.parametrize("pieces, stops, shown", [
    (["ab", "c", "d"], ["cd"], "ab"),
    (["ab", "c", "e"], ["cd"], "abce"),
    (["a", "b", "a", "b", "c"], ["abc"], "ab"),
    (["one\nUs", "er: no"], ["\nUser:"], "one"),
    (["x"], ["", "y"], "x"),
])
def test_stop_text_never_leaks_a_half(pieces, stops, shown):
    stop, out = StopText(stops), ""
    for piece in pieces:
        out += stop.feed(piece)
        assert shown.startswith(out)
        if stop.stopped:
            break
    assert out + stop.flush() == shown


def test_errors_are_one_line(model, tmp_path):
    with pytest.raises(LlamaGraphError, match="empty"):
        model.generate([])
    with pytest.raises(LlamaGraphError, match="do not fit the context of 128"):
        list(model.generate([1] * 200))
    with pytest.raises(LlamaGraphError, match=r"unknown sampling parameter.*heat"):
        model.generate("x", heat=1)


def test_a_model_that_does_not_fit_says_so_before_allocating(tmp_path):
    device = CpuDevice(available=lambda: 10_000)
    path = tiny_model(tmp_path / "m.gguf", n_ctx=100_000)
    with pytest.raises(MemoryLimitError, match=r"m\.gguf: .* 0.00 GB are free; take a smaller"):
        llamagraph.open(path, device=device)
    assert device.memory.account() == {"weights": 0}
    roomy = CpuDevice(available=lambda: 20_000_000)
    with pytest.raises(MemoryLimitError, match=r"use -c \d+ or less") as raised:
        llamagraph.open(path, device=roomy, n_ctx=100_000)
    fits = int(str(raised.value).split()[-3])
    llamagraph.open(path, device=roomy, n_ctx=fits)
    with pytest.raises(MemoryLimitError):
        llamagraph.open(path, device=roomy, n_ctx=fits + 300)


def test_what_is_not_supported_is_named(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "gpt2")
    with pytest.raises(FormatError, match="'gpt2', which is not supported; there are gemma3"):
        llamagraph.open(path, device=CpuDevice())
    path = tiny_model(tmp_path / "m.gguf", "qwen3")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"))
    with pytest.raises(FormatError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        llamagraph.open(path, device=CpuDevice())
