"""Every sampler against its published formula, written out plainly, on random logits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from llamagraph.kernels import sample
from llamagraph.kernels.sample import Candidates
from llamagraph.kernels.step import SAMPLER_FLOATS, SAMPLER_INTS, step_io
from llamagraph.program.launch import StepKey, dense
from llamagraph.program.tape import Tape
from llamagraph.program.target import target_named

N_VECTORS = 1000
PLAIN = {"temp": 1.0, "top_p": 1.0, "min_p": 0.0, "typical": 1.0, "repeat_penalty": 1.0,
         "presence_penalty": 0.0, "frequency_penalty": 0.0}


def vectors(seed: int):
    """Logits as float32, of many sizes and temperatures, and a generator of parameters."""
    rng = np.random.default_rng(seed)
    for _ in range(N_VECTORS):
        size, spread = rng.integers(1, 120), rng.uniform(0.2, 6)
        yield rng, (spread * rng.standard_normal(size)).astype(np.float32)


def softmax(logits) -> list[float]:
    weights = [math.exp(float(x) - float(max(logits))) for x in logits]
    return [w / sum(weights) for w in weights]


def by_likelihood(logits) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def all_ranked(logits) -> Candidates:
    return sample.ranked(logits, 0)


def test_top_k():
    for rng, logits in vectors(1):
        if rng.random() < 0.5:
            logits = np.round(logits)  # ties
        k = int(rng.integers(0, 130))
        expected = by_likelihood(logits)[: k or None]
        kept = sample.ranked(logits, k)
        assert kept.ids.tolist() == expected
        assert kept.logits.tolist() == [logits[i] for i in expected]


def test_top_p_is_the_smallest_set_that_holds_p():
    for rng, logits in vectors(2):
        p, probs = float(np.float32(rng.uniform(0, 1))), softmax(logits)
        expected, mass = [], 0.0
        for i in by_likelihood(logits):
            expected.append(i)
            mass += probs[i]
            if mass >= p:
                break
        assert sample.top_p(all_ranked(logits), p).ids.tolist() == expected


def test_min_p_keeps_what_is_p_times_as_likely_as_the_best():
    for rng, logits in vectors(3):
        p, probs = float(np.float32(rng.uniform(0, 1))), softmax(logits)
        expected = [i for i in by_likelihood(logits) if probs[i] >= p * max(probs)]
        assert sample.min_p(all_ranked(logits), p).ids.tolist() == expected


def test_typical_keeps_the_surprises_nearest_to_the_entropy():
    for rng, logits in vectors(4):
        p, probs = float(np.float32(rng.uniform(0, 1))), softmax(logits)
        entropy = sum(-q * math.log(q) for q in probs)
        expected, mass = set(), 0.0
        for i in sorted(range(len(logits)), key=lambda i: abs(-math.log(probs[i]) - entropy)):
            expected.add(i)
            mass += probs[i]
            if mass > p:
                break
        kept = sample.typical(all_ranked(logits), p).ids.tolist()
        assert kept == [i for i in by_likelihood(logits) if i in expected]


def test_temperature_divides_the_logits():
    for rng, logits in vectors(5):
        temp = float(np.float32(rng.uniform(0.1, 3)))
        kept = sample.temperature(all_ranked(logits), temp)
        expected = softmax([float(x) / temp for x in logits])
        got = dict(zip(kept.ids.tolist(), kept.probabilities().tolist(), strict=True))
        assert all(abs(got[i] - q) <= 2e-6 for i, q in enumerate(expected))
        assert sample.temperature(all_ranked(logits), 0).ids.tolist() == [
            int(np.argmax(logits))
        ]


def test_penalties():
    for rng, logits in vectors(6):
        recent = rng.integers(0, len(logits), rng.integers(1, 30)).astype(np.int32)
        repeat, presence, frequency = (float(np.float32(x)) for x in rng.uniform(0.5, 1.5, 3))
        got = sample.penalised(logits, recent, repeat, presence, frequency)
        for i, x in enumerate(logits.tolist()):
            count = recent.tolist().count(i)
            if count:
                x = (x / repeat if x > 0 else x * repeat) - frequency * count - presence
            assert got[i] == pytest.approx(x, rel=1e-5, abs=1e-5)


def test_draw_inverts_the_distribution():
    for rng, logits in vectors(7):
        u, probs, mass = float(rng.random()), softmax(logits), 0.0
        for expected in by_likelihood(logits):
            mass += probs[expected]
            if mass > u:
                break
        if abs(mass - u) > 1e-6 and abs(mass - probs[expected] - u) > 1e-6:
            assert sample.draw(all_ranked(logits), u) == expected


def test_philox_is_the_published_one():
    """The known answer of the Random123 library for a counter and key of zero."""
    assert sample.philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def test_draws_follow_the_probabilities():
    logits, n = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32)), 20000
    draws = [sample.draw(all_ranked(logits), sample.uniform(7, at)) for at in range(n)]
    for count, p in zip(np.bincount(draws), (0.5, 0.25, 0.125, 0.125), strict=True):
        assert abs(count / n - p) < 5 * math.sqrt(p * (1 - p) / n)


def chosen(logits, tokens=(), bias=None, position: int | None = None, **changed) -> int:
    """The token that `choose_chain` writes behind `tokens`, and publishes."""
    ints = {"top_k": 0, "repeat_last_n": 64, "seed_low": 5, "seed_high": 0,
            "n_bias": len(bias or {})} | {k: v for k, v in changed.items() if k in SAMPLER_INTS}
    floats = PLAIN | {k: v for k, v in changed.items() if k in SAMPLER_FLOATS}
    sequence = np.array([*tokens, -1], np.int32)
    pos, n_rows = np.array([len(tokens) - 1], np.int32), np.array([1], np.int32)
    counters, published = np.zeros(1, np.uint32), np.zeros_like(sequence)
    sample.choose_chain.reference(
        np.array([logits], np.float32), np.array([floats[n] for n in SAMPLER_FLOATS], np.float32),
        np.array([ints[n] for n in SAMPLER_INTS], np.int32),
        np.array(list(bias or {}), np.int32), np.array(list((bias or {}).values()), np.float32),
        np.zeros(2, np.uint32), counters, pos, n_rows, sequence, published, len(logits),
    )
    assert (pos[0], n_rows[0], counters[0]) == (len(tokens), 1, 0)
    assert published.tolist() == [0] * len(tokens) + [sequence[-1] + 1]
    return int(sequence[-1])


def test_bias_comes_before_the_penalties():
    # 1 + 2 halved is 1.5, below 2; halved first it would be 2.5.
    assert chosen([1, 2], [0], {0: 2}, temp=0.0, repeat_penalty=2.0) == 1
    assert chosen([1, 2], [0], {0: 2}, temp=0.0) == 0


def test_penalties_see_the_last_tokens_alone():
    logits = [3, 2, 1]
    assert chosen(logits, [0, 1, 1], temp=0.0, presence_penalty=9, repeat_last_n=2) == 0
    assert chosen(logits, [0, 1, 1], temp=0.0, presence_penalty=9, repeat_last_n=3) == 2
    assert chosen(logits, [0, 1, 1], temp=0.0, presence_penalty=9, repeat_last_n=-1) == 2
    assert chosen(logits, [0, 1, 1], temp=0.0, presence_penalty=9, repeat_last_n=0) == 0


def test_draws_depend_on_seed_and_position_alone():
    logits = np.zeros(50)
    first = [chosen(logits, [0] * n) for n in range(1, 20)]
    assert first == [chosen(logits, [1] * n) for n in range(1, 20)]
    assert first != [chosen(logits, [0] * n, seed_high=1) for n in range(1, 20)]
    assert len(set(first)) > 10


@pytest.mark.parametrize("changed", [{}, {"temp": 0.0}, {"top_k": 2}, {"typical": 0.5},
                                     {"top_p": 0.0, "min_p": 2.0, "temp": 1e-30}])
def test_numbers_that_are_none(changed):
    nan, inf = float("nan"), float("inf")
    assert chosen([nan, -inf, 1, -inf, nan], [0], **changed) == 2
    assert chosen([nan, inf, 1], [0], **changed) == 1
    assert 0 <= chosen([nan, nan, -inf], [0], **changed) < 3


def test_greedy_takes_the_first_of_equals_and_no_nan():
    logits = np.array([[np.nan, 1, 3, 3, -np.inf]], np.float32)
    pos, n_rows, tokens, seen = (np.array(x, np.int32) for x in ([2], [3], [9] * 7, [0] * 7))
    ids, bias = np.array([2, 3], np.int32), np.array([-9, 9], np.float32)

    def choose(n_bias: int) -> None:
        ints = np.array([0, 0, 0, 0, n_bias], np.int32)
        sample.choose_greedy.reference(logits, ints, ids, bias, np.zeros(2, np.uint32),
                                       np.zeros(1, np.uint32), pos, n_rows, tokens, seen, 5)

    choose(0)
    assert tokens.tolist() == [9, 9, 9, 9, 9, 2, 9] and seen.tolist() == [0] * 5 + [3, 0]
    assert (pos[0], n_rows[0]) == (5, 1)
    choose(1)  # token 2 falls behind
    assert tokens[6] == 3


@pytest.mark.parametrize(("temp", "top_k", "typical", "n_vocab", "can"), [
    (0.8, 40, 1.0, 128256, True), (0.8, 128, 0.5, 262144, True), (0.0, 0, 1.0, 1000, True),
    (0.8, 0, 1.0, 1000, False), (0.8, 129, 1.0, 1000, False), (0.0, 0, 0.9, 1000, False),
    (0.8, 40, 1.0, 1 << 20, False),
])
def test_what_a_gpu_can_choose(temp, top_k, typical, n_vocab, can):
    params = SimpleNamespace(temp=temp, top_k=top_k, typical=typical)
    assert sample.device_can(params, n_vocab) == can


@pytest.mark.parametrize("sampler", ["greedy", "chain"])
@pytest.mark.parametrize("target", ["numpy", "sm_75", "sm_90a"])
def test_one_launch_ends_the_step(sampler, target):
    tape = Tape(target_named(target), StepKey(sampler=sampler), step_io(100))
    logits = dense("logits", "scratch", 0, (1, 128256))
    sample.choose(tape, logits)
    (launch,) = tape.program().launches
    assert launch.geometry.grid == (32, 1, 1)  # 4096 logits a block
    assert {b.name for b, role in launch.touches() if role.writes} == {
        "partials", "counters", "pos", "n_rows", "tokens", "published"
    }
