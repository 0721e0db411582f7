"""Answers that a grammar constrains: through the model, its executors and the command line."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from stub_model import TEXTS, matcher
from tiny import tiny_model

import llamagraph
from llamagraph.cli import cli
from llamagraph.devices.cpu import CpuDevice
from llamagraph.errors import LlamaGraphError
from llamagraph.execute import EXECUTORS
from llamagraph.sampling import SamplingParams
from llamagraph.sampling_host import HostChain
from llamagraph.text.matcher import Constraint

NUMBERS = 'root ::= [1-9] [0-9]{0,3} (", " [1-9] [0-9]{0,3}){2,4}'
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8},
                                           "age": {"type": "integer", "minimum": 1, "maximum": 99}},
          "required": ["name", "age"]}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=1024))


@pytest.fixture(scope="module")
def model(path):
    with llamagraph.open(path, device=CpuDevice()) as model:
        yield model


@pytest.mark.parametrize("sampling", [
    {"temp": 0}, {"seed": 5}, {"seed": 6, "top_k": 0, "top_p": 1},
])
def test_an_answer_is_what_the_grammar_wants(model, sampling):
    answer = model.generate("hello", grammar=NUMBERS, **sampling)
    text = "".join(piece for _, piece in answer)
    assert re.fullmatch(r"[1-9]\d{0,3}(, [1-9]\d{0,3}){2,4}", text)
    assert answer.stop_reason == "eog" and answer.text == text
    c = answer.timings.constraint
    assert c.n_tokens == answer.timings.n_generated and 0 < c.n_rejected <= c.n_tokens
    timings = answer.timings.as_dict()
    assert timings["grammar_rejections"] == c.n_rejected and timings["grammar_us_per_token"] > 0


def test_a_matcher_serves_many_answers(model):
    m = model.matcher(json_schema=PERSON)
    for seed in range(5):
        answer = model.generate("hello", grammar=m, seed=seed, temp=2)
        found = json.loads("".join(piece for _, piece in answer))
        assert len(found["name"]) <= 8 and 1 <= found["age"] <= 99


@pytest.mark.parametrize("mode", EXECUTORS)
def test_every_mode_writes_the_same(path, model, mode):
    with llamagraph.open(path, device=CpuDevice(), mode=mode) as other:
        for seed in (1, 2):
            answers = [list(m.generate("hello", grammar=NUMBERS, seed=seed))
                       for m in (model, other)]
            assert answers[0] == answers[1]


def test_where_only_the_end_is_left_it_ends_also_with_ignore_eos(model):
    answer = model.generate("hello", grammar='root ::= "ab"', ignore_eos=True, temp=0)
    assert "".join(piece for _, piece in answer) == "ab" and answer.stop_reason == "eog"
    more = model.generate("hello", grammar='root ::= "a"*', ignore_eos=True, limit=20)
    assert "".join(piece for _, piece in more) == "a" * 20


def test_an_answer_without_a_grammar_follows(model):
    before = list(model.generate("hello", limit=5, seed=1))
    list(model.generate("hello", grammar=NUMBERS, seed=1))
    assert list(model.generate("hello", limit=5, seed=1)) == before


def test_a_bias_against_all_that_is_allowed_is_one_line(model):
    forbidden = {id: float("-inf") for id in model.tokenizer.encode("a")}
    answer = model.generate("x", grammar='root ::= "a"', logit_bias=forbidden)
    with pytest.raises(LlamaGraphError, match="forbidden by a bias"):
        list(answer)
    assert list(model.generate("x", limit=2, seed=1))


def test_named_tokens_are_the_models(model):
    m = model.matcher("root ::= <|im_start|> !<|im_end|>{2} [a-z]")
    answer = model.generate("hello", grammar=m, seed=3)
    assert model.tokenizer.token_text(next(id for id, _ in answer)) == "<|im_start|>"


def test_drawing_again_leaves_the_probabilities_as_they_are():
    """A token that fits keeps its share of those that fit, whatever was drawn first."""
    m = matcher('root ::= [abc] "d"')
    logits = np.full(len(TEXTS), -5, np.float32)
    logits[[ord(c) for c in "abcx"]] = 0, 1, 2, 3
    counts, n = dict.fromkeys(map(ord, "abc"), 0), 6000
    for seed in range(n):
        chain = HostChain(SamplingParams(temp=1, top_k=0, top_p=1, min_p=0, seed=seed))
        constraint = Constraint(m)
        token = chain.choose(logits, [1])
        if not constraint.accepts(token):
            token = chain.choose(constraint.masked(logits), [1], again=True)
        counts[token] += 1
    expected = n * np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    chi_square = ((np.array(list(counts.values())) - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # one in a thousand, with two degrees of freedom


def invoke(path, *arguments):
    return CliRunner().invoke(cli, ["run", "--device", "cpu", "-m", path, "hello", "-s", "1",
                                    *arguments])


def test_the_options_and_what_they_cost(path, tmp_path):
    (tmp_path / "n.gbnf").write_text(NUMBERS + "  # numbers\n")
    (tmp_path / "s.json").write_text(json.dumps(PERSON))
    first = invoke(path, "--grammar", NUMBERS)
    assert first.exit_code == 0 and first.stdout[0].isdigit()
    assert re.search(r"\[ grammar: \d+ of \d+ tokens chosen again, \d+ us a token \]", first.stderr)
    assert invoke(path, "--grammar-file", str(tmp_path / "n.gbnf")).stdout == first.stdout
    for option in (["-j", json.dumps(PERSON)], ["--json-schema-file", str(tmp_path / "s.json")]):
        result = invoke(path, *option, "--json")
        report = json.loads(result.stdout)
        assert set(json.loads(report["text"])) == {"name", "age"}
        assert report["timings"]["grammar_rejections"] > 0
    plain = invoke(path, "-n", "3")
    assert "grammar" not in plain.stderr + plain.stdout


@pytest.mark.parametrize("arguments, code, said", [
    (["--grammar", "root ::= ("], 1, "--grammar:1:10: this parenthesis is never closed"),
    (["--grammar-file", "nowhere.gbnf"], 1, "nowhere.gbnf: cannot be read"),
    (["-j", "{"], 1, "--json-schema: this is no JSON"),
    (["-j", '{"not": {}}'], 1, "--json-schema: #: not cannot be turned"),
    (["-jf", "nowhere.json"], 1, "nowhere.json: cannot be read"),
    (["--grammar", "root ::= .", "-j", "{}"], 2, "--grammar and --json-schema exclude"),
])
def test_mistakes_are_one_line_with_their_codes(path, arguments, code, said):
    result = invoke(path, *arguments)
    assert result.exit_code == code and result.stdout == ""
    assert said in result.stderr + str(result.exception)


def test_a_real_model_fills_a_schema_in(model_path):
    with llamagraph.open(model_path("smollm2"), device=CpuDevice(), n_ctx=256) as model:
        answer = model.generate("A person as JSON: ", temp=0, limit=60,
                                grammar=model.matcher(json_schema=PERSON))
        found = json.loads("".join(piece for _, piece in answer))
    assert set(found) == {"name", "age"} and answer.stop_reason == "eog"
