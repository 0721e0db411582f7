"""Conversations: what a turn reads anew, what stays when one goes back, and files."""

import json

import pytest
from tiny import CHATML, N_VOCAB, tiny_model

import llamagraph
from llamagraph.conversation import Conversation
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError

DRAWN = {"limit": 8, "seed": 5, "ignore_eos": True, "temp": 2.0, "top_k": 0, "min_p": 0.0,
         "top_p": 1.0, "logit_bias": dict.fromkeys(range(N_VOCAB - 3, N_VOCAB), -float("inf"))}
THINKS = 'root ::= "<think>" [a-z]{3} "</think>" [A-Z]{2}'
STRIPPED = CHATML.replace("assistant\n{%", "assistant\n<think>{%")  # only the last answer begins so


def open_model(path, n_ctx=512):
    return llamagraph.open(path, device=CpuDevice(), n_ctx=n_ctx)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=512)


@pytest.fixture
def model(path):
    with open_model(path) as opened:
        yield opened


def say(turn):
    """Runs a turn to its end; the turn."""
    for _ in turn:
        pass
    return turn


def test_only_new_tokens_are_read_whatever_was_drawn(model):
    """Random tokens are not how the text would be encoded: those that were drawn stay."""
    c = Conversation(model, system="hello", settings=DRAWN)
    first = say(c.ask("hello world"))
    assert first.answer.timings.n_reused == 0
    for text in ("world", "hello", "or"):
        before = list(c.tokens)
        turn = say(c.ask(text))
        assert c.tokens[: len(before)] == before
        t = turn.answer.timings
        assert t.n_reused == len(before) - 1 and t.n_prompt == len(turn.answer.prompt_tokens) - (
            len(before) - 1)
        assert c.tokens == turn.answer.prompt_tokens + turn.answer.tokens
    assert [m["role"] for m in c.messages] == ["user", "assistant"] * 4
    assert model.tokenizer.encode(first.said, add_special=False) != first.answer.tokens


def test_a_turn_is_what_the_whole_conversation_read_anew_is(model, path):
    c = Conversation(model, settings={**DRAWN, "temp": 0})
    say(c.ask("hello"))
    turn = say(c.ask("world"))
    with open_model(path) as fresh:
        anew = fresh.generate(turn.answer.prompt_tokens, **c.settings)
        assert [t.id for t in anew] == turn.answer.tokens


def test_another_answer_takes_the_place_of_the_last_one(model):
    c = Conversation(model, settings=DRAWN)
    with pytest.raises(LlamaGraphError, match="nothing yet"):
        c.again()
    texts = [say(c.ask("hello")).said, say(c.again()).said, say(c.again()).said]
    assert len(set(texts)) == 3  # each with a seed of its own
    assert [m["content"] for m in c.messages] == ["hello", texts[2]]
    turn = say(c.ask("world"))
    assert turn.answer.timings.n_prompt < 30
    c.clear()
    assert c.messages == [] and say(c.ask("hello")).said == texts[0]


def test_an_answer_that_is_broken_off_stays_and_one_that_never_began_does_not(model):
    c = Conversation(model, settings=DRAWN)
    turn = c.ask("hello")
    for i, _ in enumerate(turn):
        if i == 2:
            break
    assert len(turn.answer.tokens) == 3 and c.messages[-1]["content"] == turn.said
    assert say(c.ask("world")).answer.timings.n_prompt < 30
    before = list(c.messages)

    def interrupt():
        raise KeyboardInterrupt

    model.runner.before_step = interrupt
    turn = c.ask("hello")
    with pytest.raises(KeyboardInterrupt):
        say(turn)
    model.runner.before_step = lambda: None
    assert turn.taken_back and c.messages == before
    expected = Conversation(model, settings=DRAWN, messages=list(before))
    assert say(c.ask("or")).answer.prompt_tokens[:5] == say(
        expected.ask("or")).answer.prompt_tokens[:5]


def test_a_long_prompt_can_be_stopped_between_its_steps(path):
    with llamagraph.open(path, device=CpuDevice(), n_ctx=512, n_ubatch=16) as model:
        c = Conversation(model, settings=DRAWN)
        steps = []

        def interrupt():
            steps.append(model.runner.n_past)
            if len(steps) == 4:
                raise KeyboardInterrupt

        model.runner.before_step = interrupt
        with pytest.raises(KeyboardInterrupt):
            say(c.ask("hello world " * 60))
        assert steps == [0, 16, 32, 48]
        model.runner.before_step = lambda: None
        turn = say(c.ask("hello world " * 60))
        assert turn.answer.timings.n_reused == 48
        with open_model(path) as fresh:
            anew = fresh.generate(turn.answer.prompt_tokens, **DRAWN)
            assert [t.id for t in anew] == turn.answer.tokens


def test_a_full_context_is_one_line_or_is_shifted(path):
    with open_model(path, 64) as model:
        c = Conversation(model, settings=DRAWN)
        say(c.ask("hello"))
        say(c.ask("world"))
        before = list(c.messages)
        with pytest.raises(LlamaGraphError, match=r"takes \d+ tokens, the context has 64"):
            c.ask("hello world " * 9)
        assert c.messages == before
        c.settings["context_shift"] = True
        assert say(c.ask("hello world " * 9)).answer.stop_reason == "limit"


@pytest.mark.parametrize("keep", [0, 7, -1, 1000])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_chat_longer_than_its_context_reads_only_new_tokens(tmp_path, arch, keep):
    path = tiny_model(tmp_path / "m.gguf", arch, n_ctx=2048)
    with open_model(path, 128) as model:
        c = Conversation(model, settings={**DRAWN, "context_shift": True, "keep": keep})
        for turn in range(16):
            t = say(c.ask("hello")).answer.timings
            assert turn == 0 or t.n_prompt < 30, turn
        first = c._first
        assert c.n_dropped > 128 and len(c.tokens) > 2 * 128
        assert model.runner.sequence[: first * (keep in (-1, 1000))] == c.tokens[
            : first * (keep in (-1, 1000))]


def test_thinking_is_no_part_of_what_was_said(model):
    c = Conversation(model, settings={**DRAWN, "limit": 40, "grammar": THINKS})
    turn = c.ask("hello")
    pieces = [piece for _, found in turn for piece in found]
    assert len(turn.thought) == 3 and len(turn.said) == 2
    assert "".join(p.text for p in pieces if p.thinking) == turn.thought
    assert c.messages[-1] == {"role": "assistant", "content": turn.said,
                              "reasoning_content": turn.thought}
    again = say(c.ask("world")).answer
    assert "think" not in model.tokenizer.decode(again.prompt_tokens)
    assert again.timings.n_reused > 10  # up to the answer, which lost its thoughts


def test_a_template_may_begin_an_answer_in_a_way_that_it_does_not_keep(model):
    """As templates do that put an open tag before the answer alone."""
    c = Conversation(model, template=STRIPPED, settings=DRAWN)
    say(c.ask("hello"))
    before = list(c.tokens)
    say(c.ask("world"))
    third = say(c.ask("hello")).answer
    assert third.timings.n_reused > len(before)


def test_raw_text_is_written_on_in_turn(model):
    c = Conversation(model, raw=True, system="x", settings={**DRAWN, "temp": 0, "limit": 30})
    turn = say(c.ask("hello"))
    text = turn.said
    assert turn.answer.prompt_tokens == model.tokenizer.encode("x\nhello")
    c.clear()
    c.settings["stop"] = [text[2:4]]
    turn = say(c.ask("hello"))
    assert turn.answer.stop_reason == "stop" and turn.said.endswith(text[2:4])
    before = list(c.tokens)
    say(c.ask(" world"))
    assert c.tokens[: len(before)] == before
    n = len(c.messages)
    say(c.ask(""))
    assert [m["role"] for m in c.messages[n - 1 :]] == ["assistant", "assistant"]
    assert model.tokenizer.decode(c.tokens) == "x\n" + "".join(m["content"] for m in c.messages)


# ---- Files ----


def test_a_saved_conversation_goes_on(model, tmp_path):
    c = Conversation(model, system="be kind", settings={**DRAWN, "temp": 0})
    say(c.ask("hello"))
    say(c.ask("wörld"))
    file = tmp_path / "c.json"
    c.save(file)
    c.save(file)  # over what it has written itself
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    found = json.loads(file.read_text("utf-8"))
    assert found["messages"][0] == {"role": "system", "content": "be kind"}
    other = Conversation(model, settings=c.settings)
    other.load(file)
    assert (other.system, other.messages) == (c.system, c.messages)
    say(c.ask("hello"))
    say(other.ask("hello"))
    assert other.messages[-1]["role"] == "assistant"


def test_a_plain_list_of_messages_is_read_too(model, tmp_path):
    file = tmp_path / "c.json"
    file.write_text('[{"role": "user", "content": "hello", "name": "x"}]')
    c = Conversation(model, system="old", settings=DRAWN)
    c.load(file)
    assert c.system is None and c.messages == [{"role": "user", "content": "hello"}]
    assert say(c.again()).said and len(c.messages) == 2


@pytest.mark.parametrize("text, reason", [
    ("", "not JSON"), ("{", "not JSON"), ("[" * 100000, "not JSON"), ("\x00\xff", "not JSON"),
    ("3", 'no list of "messages"'), ("{}", 'no list of "messages"'), ('["a"]', "message 1 needs"),
    ('[{"role": "user"}]', "message 1 needs"), ('[{"content": "a"}]', "message 1 needs"),
    ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 2 needs"),
    ('[{"role": "user", "content": 3}]', "message 1 needs"),
    ('[{"role": ["user"], "content": "a"}]', "message 1 needs"),
])
def test_a_damaged_file_changes_nothing_and_is_never_written_over(model, tmp_path, text, reason):
    file = tmp_path / "c.json"
    file.write_bytes(text.encode("latin-1"))
    c = Conversation(model, system="old", settings=DRAWN)
    say(c.ask("hello"))
    before = list(c.messages)
    with pytest.raises(LlamaGraphError, match=reason) as error:
        c.load(file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)
    assert c.messages == before and c.system == "old"
    if text:
        with pytest.raises(LlamaGraphError, match="holds no conversation"):
            c.save(file)
        assert file.read_bytes() == text.encode("latin-1")


def test_an_answer_with_no_question_is_not_lost(model, tmp_path):
    file = tmp_path / "c.json"
    file.write_text('[{"role": "assistant", "content": "hello"}]')
    c = Conversation(model, settings=DRAWN)
    c.load(file)
    with pytest.raises(LlamaGraphError, match="nothing yet"):
        c.again()
    assert [m["content"] for m in c.messages] == ["hello"]
    raw = Conversation(model, system="world", settings=DRAWN, raw=True)
    first = say(raw.ask(""))
    assert say(raw.again()).said != first.said and len(raw.messages) == 1


def test_what_is_no_text_can_be_saved(model, tmp_path):
    """Bytes of a command line that are no UTF-8 are such characters in Python."""
    c = Conversation(model, system="caf\udce9", settings=DRAWN)
    c.save(tmp_path / "c.json")
    c.load(tmp_path / "c.json")
    assert c.system == "caf?"


def test_files_that_cannot_be(model, tmp_path):
    c = Conversation(model, settings=DRAWN)
    with pytest.raises(LlamaGraphError, match="cannot be read"):
        c.load(tmp_path / "none.json")
    with pytest.raises(LlamaGraphError, match="cannot be written"):
        c.save(tmp_path / "none" / "c.json")
    with pytest.raises(LlamaGraphError):
        c.save(tmp_path)


def test_smollm2_remembers_and_reads_only_what_is_new(model_path):
    with llamagraph.open(model_path("smollm2"), device="cpu", n_ctx=512) as model:
        c = Conversation(model, settings={"temp": 0, "limit": 24})
        say(c.ask("My name is Ada. Say hello to me."))
        second = say(c.ask("What is my name?"))
        assert second.answer.timings.n_prompt <= 18
        assert second.answer.timings.n_reused >= 40
        text = model.tokenizer.apply_chat_template(c.messages[:3])
        assert model.tokenizer.decode(second.answer.prompt_tokens) == text
