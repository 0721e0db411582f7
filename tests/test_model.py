"""The Python face on tiny models: generation, stops, limits, errors."""

import numpy as np
import pytest
from plain_forward import PlainModel
from tiny import N_VOCAB, tiny_model

import llamagraph
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import FormatError, LlamaGraphError, MemoryLimitError
from llamagraph.gguf import GGUFFile
from llamagraph.planner import usual_keys
from llamagraph.program.launch import StepKey
from llamagraph.text.stops import StopText


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
        llamagraph.open(path, device=roomy, n_ctx=fits + 3000)


def test_what_is_not_supported_is_named(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "gpt2")
    with pytest.raises(FormatError, match="'gpt2', which is not supported; there are gemma3"):
        llamagraph.open(path, device=CpuDevice())
    path = tiny_model(tmp_path / "m.gguf", "qwen3")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"))
    with pytest.raises(FormatError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        llamagraph.open(path, device=CpuDevice())


def test_an_answer_ends_when_another_begins(model):
    first = iter(model.generate("hello", limit=9, ignore_eos=True))
    next(first)
    second = iter(model.generate("world", limit=9, temp=0, ignore_eos=True))
    next(second)
    with pytest.raises(LlamaGraphError, match="another answer has begun"):
        next(first)
    rest = [id for id, _ in second]
    alone = [id for id, _ in model.generate("world", limit=9, temp=0, ignore_eos=True)]
    assert rest == alone[1:]


def test_an_answer_is_iterated_once(model):
    answer = model.generate("hello", limit=2, ignore_eos=True)
    assert len(list(answer)) == 2
    with pytest.raises(LlamaGraphError, match="iterated once"):
        list(answer)


@pytest.mark.parametrize("tokens", [[99999], [-1]])
def test_tokens_that_the_model_does_not_have(model, tokens):
    with pytest.raises(LlamaGraphError, match="none of the model's, 0 to 268"):
        model.logits(tokens)
    with pytest.raises(LlamaGraphError, match="none of the model's"):
        list(model.generate(tokens))


@pytest.mark.parametrize("sampling, message", [
    ({"top_k": 3_000_000_000}, "top_k is 3000000000"), ({"seed": 1.5}, "seed is 1.5"),
    ({"temp": "hot"}, "temp is hot"), ({"repeat_penalty": 0}, "repeat_penalty is 0"),
])
def test_sampling_parameters_out_of_range(model, sampling, message):
    with pytest.raises(LlamaGraphError, match=message):
        model.generate("x", **sampling)


def test_a_stop_text_may_be_a_single_string(model):
    whole = model.generate("hello", limit=12, temp=0, ignore_eos=True)
    text = "".join(t for _, t in whole)
    answer = model.generate("hello", limit=12, temp=0, ignore_eos=True, stop=text[3:6])
    assert "".join(t for _, t in answer) == text[: text.index(text[3:6])]


@pytest.mark.parametrize("n_ctx", [-1, 1 << 40])
def test_a_context_out_of_range(tmp_path, n_ctx):
    with pytest.raises(LlamaGraphError, match="a context has 1 to"):
        llamagraph.open(tiny_model(tmp_path / "m.gguf"), device=CpuDevice(), n_ctx=n_ctx)


def test_an_unknown_mode_is_named(tmp_path):
    with pytest.raises(LlamaGraphError, match="'graph' is unknown; there are stream, capture"):
        llamagraph.open(tiny_model(tmp_path / "m.gguf"), device=CpuDevice(), mode="graph")


@pytest.mark.parametrize("arch, name", [("qwen3", "attn_k_norm"), ("gemma3", "post_ffw_norm")])
def test_a_norm_that_the_architecture_needs(tmp_path, arch, name):
    path = tiny_model(tmp_path / "m.gguf", arch)
    wrong = name[:-1] + "x"
    path.write_bytes(path.read_bytes().replace(f"blk.1.{name}".encode(), f"blk.1.{wrong}".encode()))
    with pytest.raises(FormatError, match=rf"tensor blk\.1\.{name}\.weight is missing"):
        llamagraph.open(path, device=CpuDevice())


def test_samplers_of_the_host_work_in_every_mode(model):
    """A graph ends before the choice; the next step waits for it."""
    changed = {"dry_multiplier": 0.8, "mirostat": 2, "xtc_probability": 0.5}
    for name, value in changed.items():
        one, two = (list(model.generate("hello", limit=20, seed=3, ignore_eos=True,
                                        **{name: value})) for _ in range(2))
        assert len(one) == 20 and one == two


def test_dry_stops_a_repetition(model):
    once = list(model.generate("hello", limit=30, temp=0, ignore_eos=True))
    answer = model.generate("hello", limit=30, temp=0, ignore_eos=True, dry_multiplier=1e4,
                            dry_penalty_last_n=-1, dry_sequence_breakers=("\n",))
    tokens = [id for id, _ in answer]
    pairs = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    assert len(set(pairs)) == len(pairs) and tokens != [id for id, _ in once]
    assert answer.params.dry_breakers[10] == [()]  # the byte of a new line


def test_the_file_recommends_parameters(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", sampling={"temp": 0.0, "top_k": 7})
    with llamagraph.open(path, device=CpuDevice()) as model:
        params = model.generate("hello", top_k=9).params
    assert (params.temp, params.top_k, params.top_p) == (0, 9, 0.95)


def test_the_budget_of_thinking_needs_a_vocabulary_that_has_it(model):
    assert model.tokenizer.thinking_tags() is None
    assert model.generate("hello", reasoning_budget=3).params.thinking is None


@pytest.mark.parametrize("sampling", [{"temp": 0.0}, {"mirostat": 2}])
def test_warming_up_changes_nothing(model, sampling):
    prompt, cold = [7] * 60, None
    for warm in (False, True):
        answer = model.generate(prompt, limit=9, seed=5, ignore_eos=True, **sampling)
        if warm:
            answer.warm_up()
        tokens = [id for id, _ in answer]
        cold = cold or tokens
        assert tokens == cold


def test_an_open_file_and_overrides(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", n_ctx=128)
    changed = {"{arch}.context_length": 64, "general.name": "mine"}
    with llamagraph.open(path, device=CpuDevice(), overrides=changed) as model:
        assert model.runner.n_ctx == 64 and model.file.metadata["general.name"] == "mine"
    with llamagraph.open(GGUFFile(path), device=CpuDevice()) as model:
        assert model.runner.n_ctx == 128


def test_programs_are_made_before_the_first_token(tmp_path):
    file = tiny_model(tmp_path / "m.gguf")
    with llamagraph.open(file, mode="capture", device=CpuDevice()) as model:
        answer, runner = model.generate([1] * 20, limit=5, temp=0), model.runner
        loading = model.load_seconds
        answer.prepare()
        made = runner.executors.values()
        assert [e.program.key for e in made] == usual_keys(20, "greedy")
        assert model.load_seconds > loading and not runner.sequence
        tokens = [t.id for t in answer]
        assert runner.executors.made == 2 and all(e.updates == 0 for e in made)
        assert tokens == [t.id for t in model.generate([1] * 20, limit=5, temp=0)]


def test_programs_of_row_counts(tmp_path):
    file = tiny_model(tmp_path / "m.gguf")
    with llamagraph.open(file, mode="build", device=CpuDevice()) as model:
        model.generate("x").prepare([1, 7, 8, 2048])
        assert [e.program.key for e in model.runner.executors.values()] == [
            StepKey(1, "last", sampler="chain"), StepKey(8, "last", sampler="chain"),
            StepKey(2048, "none", sampler="chain"), StepKey(2048, "last", sampler="chain")]
        model.generate("x", grammar='root ::= "a"').prepare([1])
        assert model.runner.executors.values()[-1].program.key.sampler == "host"
        model.runner.executors.limit = 4
        model.runner.prepare([StepKey(32), StepKey(1)])
        assert len(model.runner.executors) == 4
        with pytest.raises(LlamaGraphError, match="2049: a step has 1 to 2048 rows"):
            model.generate("x").prepare([2049])


@pytest.mark.parametrize("n_prompt, rows", [(1, [1]), (5, [8, 1]), (512, [512, 1]),
                                            (2100, [2048, 64, 1]), (1100, [1024, 128, 1]),
                                            (1536, [1024, 512, 1]), (1537, [2048, 1])])
def test_the_usual_programs_are_those_that_prefill_and_decode_take(n_prompt, rows):
    keys = usual_keys(n_prompt, "chain")
    assert [k.rows for k in keys] == rows and all(k.sampler == "chain" for k in keys)
    assert [k.logits for k in keys[:-1]] == ["none"] * (len(rows) - 2) + ["last"] * (len(rows) > 1)
