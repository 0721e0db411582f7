"""The samplers of the host against their published formulas, written out plainly."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from test_sample import all_ranked, by_likelihood, chosen, softmax, vectors

from llamagraph.errors import FormatError, LlamaGraphError
from llamagraph.kernels import sample, samplers
from llamagraph.kernels.sample import Candidates
from llamagraph.kernels.step import SAMPLER_FLOATS, SAMPLER_INTS
from llamagraph.program.target import target_named
from llamagraph.sampling import (
    DEVICE,
    SAMPLERS,
    SamplingParams,
    file_defaults,
    read_letters,
    read_samplers,
)
from llamagraph.sampling_host import HostChain
from llamagraph.text.breakers import sequence_breakers

CUDA, NUMPY = target_named("sm_90a"), target_named("numpy")
OFF = {k: v for s in SAMPLERS.values() for k, v in s.off.items()}


def plain(c: Candidates) -> dict[int, float]:
    return dict(zip(c.ids.tolist(), c.logits.tolist(), strict=True))


def single(x) -> float:
    return float(np.float32(x))


def test_top_n_sigma():
    for rng, logits in vectors(11):
        n = single(rng.uniform(0.1, 3))
        values = logits.astype(np.float64).tolist()
        mean = sum(values) / len(values)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
        bound = max(values) - n * sigma
        if min(abs(x - bound) for x in values) > 1e-5:
            expected = [i for i in by_likelihood(logits) if values[i] >= bound]
            assert samplers.top_n_sigma(all_ranked(logits), n).ids.tolist() == expected


def test_xtc_removes_all_but_the_least_likely_of_the_top_choices():
    for rng, logits in vectors(12):
        threshold, probability, chance = single(rng.uniform(0, 0.55)), rng.random(), rng.random()
        ids, probs = by_likelihood(logits), softmax(logits)
        above = [i for i in ids if probs[i] >= threshold]
        if chance < probability and threshold <= 0.5 and len(above) >= 2:
            ids = [i for i in ids if i not in above[:-1]]
        if min(abs(p - threshold) for p in probs) > 1e-6:
            kept = samplers.xtc(all_ranked(logits), probability, threshold, chance)
            assert kept.ids.tolist() == ids


def test_dynamic_temperature_follows_the_entropy():
    for rng, logits in vectors(13):
        temp, spread, exponent = (single(x) for x in rng.uniform(0.1, 2, 3))
        probs = softmax(logits)
        got = samplers.dynamic_temperature(all_ranked(logits), temp, spread, exponent)
        if len(logits) == 1:
            assert got.ids.tolist() == [0]
            continue
        share = -sum(p * math.log(p) for p in probs) / math.log(len(probs))
        low, high = max(0, temp - spread), temp + spread
        t = low + (high - low) * share**exponent
        expected = softmax([float(x) / t for x in logits])
        for i, p in zip(got.ids.tolist(), got.probabilities().tolist(), strict=True):
            assert abs(p - expected[i]) < 1e-5


def repeated_before(tokens: list[int], token: int) -> int:
    """The longest end of the tokens that, somewhere in them, `token` follows."""
    return max((n for n in range(len(tokens)) for at in range(n, len(tokens))
                if tokens[at] == token and tokens[at - n : at] == tokens[len(tokens) - n :]),
               default=-1)


def test_dry_penalises_what_would_go_on_with_a_repetition():
    for rng, logits in vectors(14):
        tokens = rng.integers(0, min(len(logits), rng.integers(1, 6)), rng.integers(1, 25))
        multiplier, base = single(rng.uniform(0.1, 2)), single(rng.uniform(1, 2))
        allowed, breaker = int(rng.integers(1, 5)), int(rng.integers(0, 12))
        got = plain(samplers.dry(all_ranked(logits), tokens, multiplier, base, allowed,
                                 {breaker: [()]}))
        sequence = tokens.tolist()
        since = next((n for n, t in enumerate(reversed(sequence)) if t == breaker), len(sequence))
        for i, x in enumerate(logits.tolist()):
            length = min(repeated_before(sequence, i), since)
            if length >= allowed and i != breaker and len(sequence) > allowed:
                x -= multiplier * base ** (length - allowed)
            assert got[i] == pytest.approx(x, rel=1e-5, abs=1e-4)


def test_dry_and_breakers_of_several_tokens():
    logits = np.zeros(10, np.float32)
    window = np.array([1, 2, 3, 4, 5, 1, 2, 3])
    assert samplers.dry(all_ranked(logits), window, 1, 2, 2, {})[1].tolist()[4] == -2
    tail = {1: [(2,)]}  # "1 2" ends what can be repeated: only 3 is left
    assert not samplers.dry(all_ranked(logits), window, 1, 2, 2, tail).logits.any()
    assert samplers.dry(all_ranked(logits), window, 1, 2, 1, tail).logits[4] == -1
    other = {1: [(2, 4)]}
    assert samplers.dry(all_ranked(logits), window, 1, 2, 2, other).logits[4] == -2


def test_dry_stays_finite_and_quick_over_a_long_repetition():
    c = samplers.dry(all_ranked(np.zeros(3, np.float32)), np.ones(50_000, np.int64), 1, 2, 2, {})
    assert -3.5e38 < float(c.logits[1]) < -0.9e38 and c.logits[0] == 0


def test_penalties_of_candidates_that_are_left():
    for rng, logits in vectors(15):
        left = all_ranked(logits).where(slice(0, int(rng.integers(1, 20))))
        window = rng.integers(0, len(logits) + 3, rng.integers(1, 30))
        repeat, presence, frequency = (single(x) for x in rng.uniform(0.5, 1.5, 3))
        got = plain(samplers.penalties(left, window, repeat, presence, frequency))
        assert set(got) == set(left.ids.tolist())
        for i, x in plain(left).items():
            if count := window.tolist().count(i):
                x = (x / repeat if x > 0 else x * repeat) - frequency * count - presence
            assert got[i] == pytest.approx(x, rel=1e-5, abs=1e-5)


def test_mirostat_1_estimates_zipf_and_keeps_k():
    for rng, logits in vectors(16):
        mu, n_vocab = rng.uniform(0.5, 12), int(rng.integers(len(logits), 1000))
        probs = sorted(softmax(logits), reverse=True)[:100]
        if len(probs) < 2:
            continue
        t = [math.log((i + 2) / (i + 1)) for i in range(len(probs) - 1)]
        b = [math.log(probs[i] / probs[i + 1]) for i in range(len(probs) - 1)]
        s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
        e = s - 1
        k = (e * 2**mu / (1 - n_vocab**-e)) ** (1 / s)
        if abs(k - round(k)) > 1e-3:
            expected = min(max(int(min(k, 1e9)), 1), len(logits))
            assert samplers.mirostat_k(all_ranked(logits), n_vocab, mu) == expected


@pytest.mark.parametrize("logits", [[1.0], [2.0, 2.0, 2.0], [1e38, 0.0, -1e38]])
def test_mirostat_1_of_odd_logits_keeps_some(logits):
    c = all_ranked(np.array(logits, np.float32))
    assert 1 <= samplers.mirostat_k(c, 1000, 10.0) <= len(logits)


def test_mirostat_2_keeps_small_surprises():
    for rng, logits in vectors(17):
        mu, probs = rng.uniform(0.5, 12), softmax(logits)
        if min(abs(-math.log2(p) - mu) for p in probs) > 1e-5:
            expected = max(1, sum(-math.log2(p) <= mu for p in probs))
            assert samplers.mirostat_2(all_ranked(logits), mu) == expected


def test_adaptive_prefers_probabilities_near_the_target():
    for rng, logits in vectors(18):
        target, probs = single(rng.random()), softmax(logits)
        got = samplers.adaptive(all_ranked(logits), target)
        for i, x in plain(got).items():
            d = abs(probs[i] - target) / 0.3
            assert x == pytest.approx(5 - 10 * d * d / (1 + d), abs=1e-4)
        assert not got.ranked and sample.ordered(got).ids.tolist() == [
            i for _, i in sorted((-x, i) for i, x in plain(got).items())
        ]


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_steers_the_surprise_to_its_target(version):
    """Zipf-like logits with an entropy above the target: the mean surprise comes near to it."""
    rng, tau = np.random.default_rng(3), 3.0
    chain = HostChain(SamplingParams(mirostat=version, mirostat_ent=tau, temp=1, seed=5))
    surprises, sequence = [], [0]
    for _ in range(300):
        logits = (-1.1 * np.log(rng.permutation(np.arange(1, 2001)))).astype(np.float32)
        c = chain.candidates(logits, sequence)
        token = chain.choose(logits, sequence)
        surprises.append(-math.log2(c.probabilities()[c.ids == token][0]))
        before = chain.mu
        chain.accept(token)
        assert chain.mu == pytest.approx(before - 0.1 * (surprises[-1] - tau))
        sequence.append(token)
    assert abs(np.mean(surprises[50:]) - tau) < 0.3


def test_adaptive_p_steers_the_mean_probability():
    rng, logits = np.random.default_rng(4), np.log(np.array([0.5, 0.3, 0.1, 0.1], np.float32))
    for target in (0.15, 0.4):
        chain = HostChain(SamplingParams(adaptive_target=target, temp=1, min_p=0, top_p=1, seed=6))
        probabilities, sequence = [], []
        for _ in range(300):
            token = chain.choose(shuffled := rng.permutation(logits), sequence)
            probabilities.append(math.exp(shuffled[token]))
            chain.accept(token)
            sequence.append(token)
        assert abs(np.mean(probabilities) - target) < 0.05


# ---- The chain: order, and the device against the host ----


def test_each_sampler_is_off_by_its_fields_alone():
    rng = np.random.default_rng(5)
    logits, params = rng.standard_normal(50).astype(np.float32), SamplingParams(**OFF, seed=1)
    assert params.chain().samplers == ()
    c = HostChain(params).candidates(logits, [1, 2, 1, 2])
    assert plain(c) == plain(all_ranked(logits))


def random_params(rng) -> SamplingParams:
    """Parameters that a GPU's chain can serve."""
    return SamplingParams(
        temp=float(rng.choice([0.0, 0.5, 0.8, 1.0, 2.0])), top_k=int(rng.integers(1, 129)),
        top_p=float(rng.choice([0.3, 0.95, 1.0])), min_p=float(rng.choice([0.0, 0.05, 0.3])),
        typical=float(rng.choice([0.5, 0.9, 1.0, 1.0])), repeat_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=float(rng.choice([0.0, 0.4])), seed=int(rng.integers(1 << 40)),
        frequency_penalty=float(rng.choice([0.0, 0.2])), repeat_last_n=int(rng.integers(-1, 40)),
        logit_bias=dict(zip(rng.integers(0, 200, 3).tolist(), [2.0, -5.0, -math.inf], strict=True)),
    )


def test_the_devices_chain_is_the_hosts():
    rng = np.random.default_rng(6)
    for _ in range(1000):
        params, size = random_params(rng), int(rng.integers(200, 400))
        logits = (rng.uniform(0.5, 5) * rng.standard_normal(size)).astype(np.float32)
        tokens = rng.integers(0, 30, rng.integers(1, 60)).tolist()
        assert params.sampler(CUDA, size) in ("chain", "greedy")
        host = HostChain(params).candidates(logits, tokens)
        biased = logits.copy()
        biased[list(params.logit_bias)] += np.clip(
            np.array(list(params.logit_bias.values()), np.float32), -1e30, 1e30)
        device = sample.run_chain(biased, np.array(tokens), vars(params), vars(params))
        assert host.ids.tolist() == device.ids.tolist()
        assert np.abs(host.probabilities() - device.probabilities()).max() <= 1e-5
        changed = {n: getattr(params, n) for n in (*SAMPLER_FLOATS, *SAMPLER_INTS)
                   if hasattr(params, n)}
        seed = np.array([params.seed], np.uint64).view(np.int32)
        token = chosen(logits, tokens, {i: max(b, -1e30) for i, b in params.logit_bias.items()},
                       **changed, seed_low=seed[0], seed_high=seed[1])
        assert HostChain(params).choose(logits, tokens) == token


def test_the_order_counts():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    first = SamplingParams(samplers="top_p;temperature", top_p=0.6, temp=3, seed=1)
    second = SamplingParams(samplers="temperature;top_p", top_p=0.6, temp=3, seed=1)
    assert len(HostChain(first).candidates(logits, [0]).ids) == 2
    assert len(HostChain(second).candidates(logits, [0]).ids) == 3


@pytest.mark.parametrize(("changed", "cuda", "numpy"), [
    ({}, "chain", "chain"),
    ({"temp": 0}, "greedy", "greedy"), ({"temp": 0, "logit_bias": {3: -1.0}}, "greedy", "greedy"),
    ({"temp": 0, "top_n_sigma": 1.0}, "greedy", "greedy"),
    ({"temp": 0, "typical": 0.5}, "chain", "chain"),
    ({"temp": 0, "repeat_penalty": 1.1}, "chain", "chain"),
    ({"top_k": 0}, "host", "chain"),
    ({"samplers": "top_k;temperature"}, "chain", "chain"),
    ({"samplers": "temperature;top_k"}, "host", "host"),
    ({"samplers": "temperature;top_k", "temp": 1}, "chain", "chain"),
    ({"samplers": "penalties;temperature"}, "host", "chain"),
    ({"dry_multiplier": 0.5}, "host", "host"),
    ({"dry_multiplier": 0.5, "samplers": "top_k;temperature"}, "chain", "chain"),
    ({"xtc_probability": 0.5}, "host", "host"),
    ({"top_n_sigma": 1.0}, "host", "host"),
    ({"dynatemp_range": 0.3}, "host", "host"),
    ({"mirostat": 2}, "host", "host"),
    ({"mirostat": 1, "temp": 0}, "host", "host"),
    ({"adaptive_target": 0.5}, "host", "host"),
    ({"samplers": "top_k;adaptive_p"}, "chain", "chain"),
])
def test_what_runs_where(changed, cuda, numpy):
    params = SamplingParams(**{"top_k": 40, **changed})
    assert params.sampler(CUDA, 1000) == cuda
    assert params.sampler(NUMPY, 1000) == numpy


def test_mirostat_takes_the_place_of_the_others():
    params = SamplingParams(mirostat=2, repeat_penalty=2.0, dry_multiplier=1.0, temp=0.7)
    chain = params.chain()
    assert chain.samplers == ("temperature",) and chain.repeat_penalty == 1 and chain.top_k == 0


def test_a_choice_that_was_refused_can_be_made_again():
    """As a grammar does: the chain's memory changes only with the token that is accepted."""
    logits = np.zeros(4, np.float32)
    chain = HostChain(SamplingParams(mirostat=2, seed=1))
    refused = chain.choose(logits, [0])
    mu = chain.mu
    masked = np.full(4, -np.inf, np.float32)
    masked[(refused + 1) % 4] = 0
    token = chain.choose(masked, [0], again=True)
    assert token == (refused + 1) % 4 and chain.mu == mu
    chain.accept(token)
    assert chain.mu == mu - 0.1 * (0 - 5)


def test_a_second_draw_does_not_follow_from_the_first():
    logits, n = np.zeros(2, np.float32), 2000
    chain = HostChain(SamplingParams(seed=1, top_k=0, top_p=1, min_p=0))
    draws = [[chain.choose(logits, [0] * at, again) for again in (False, True)]
             for at in range(1, n)]
    for other in (0, 1):
        share = np.mean([second for first, second in draws if first == other])
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(n / 2)


@pytest.mark.parametrize(("sequence", "forced"), [
    ([1, 2, 8, 3, 4], True), ([1, 8, 3], False), ([8, 3, 4, 9, 5, 6], False), ([3, 4, 5], False),
    ([8, 1, 9, 8, 2, 3, 4], True), ([], False),
])
def test_thinking_ends_with_its_budget(sequence, forced):
    """Token 8 begins it, 9 ends it; two tokens in between are allowed."""
    params = SamplingParams(reasoning_budget=2, thinking=(8, 9), temp=0, seed=1)
    assert params.sampler(CUDA, 10) == "host"
    logits = np.zeros(10, np.float32)
    assert HostChain(params).choose(logits, sequence) == (9 if forced else 0)


def test_candidates_are_put_in_order_by_logit_and_then_by_id():
    for rng, logits in vectors(19):
        ids, logits = rng.permutation(len(logits)), np.round(logits)  # ties
        logits[rng.random(len(logits)) < 0.1] *= np.float32(-0.0)
        k = int(rng.integers(0, len(ids) + 1))
        found = sample.ordered(Candidates(ids, logits, ranked=False), k)
        expected = sorted(zip(-logits, ids, strict=True))[: k or None]
        assert found.ranked and found.ids.tolist() == [int(i) for _, i in expected]
        assert np.array_equal(found.logits, [-x for x, _ in expected])


def test_names_and_letters():
    assert read_samplers("top-k; TEMP;typical") == ("top_k", "temperature", "typ_p")
    assert read_letters("edskypmxt") == tuple(SAMPLERS) == SamplingParams().samplers
    assert read_letters("ka") == ("top_k", "adaptive_p")
    assert set(DEVICE) <= set(SAMPLERS)
    for read, wrong in ((read_samplers, "top_k;heat"), (read_letters, "kz")):
        with pytest.raises(LlamaGraphError, match="there is no sampler"):
            read(wrong)


@pytest.mark.parametrize("changed", [
    {"temp": math.nan}, {"top_k": 1.5}, {"top_k": 1 << 31}, {"repeat_penalty": 0.0},
    {"mirostat": 3}, {"adaptive_target": 2.0}, {"adaptive_decay": 1.0}, {"samplers": "x"},
    {"dry_base": math.inf}, {"seed": "x"}, {"logit_bias": dict.fromkeys(range(2000), 1.0)},
])
def test_parameters_that_are_none(changed):
    with pytest.raises(LlamaGraphError, match=next(iter(changed)).replace("_", "[_ ]")
                       if next(iter(changed)) != "samplers" else "sampler"):
        SamplingParams(**changed)


def metadata(**values):
    def scalar(key, kind, default):
        return values.get(key.removeprefix("general.sampling."), default)

    return SimpleNamespace(scalar=scalar, path="m.gguf")


def test_a_file_recommends_its_own():
    assert file_defaults(metadata()) == {}
    found = file_defaults(metadata(temp=0.6, top_k=20, penalty_last_n=32, mirostat_tau=4.0,
                                   sequence="top_k;temp"))
    assert SamplingParams(**found) == SamplingParams(
        temp=0.6, top_k=20, repeat_last_n=32, mirostat_ent=4.0, samplers=("top_k", "temperature"))
    with pytest.raises(FormatError, match=r"m\.gguf: general\.sampling: mirostat is 7"):
        file_defaults(metadata(mirostat=7))


def test_breakers_are_found_where_a_token_holds_or_begins_them():
    tokens = ["a", "\n", "x\n\n", "bc", "b", "c", "cd", "ab", ":"]
    encode = {"c": [5], "cd": [6], "d": [9]}.__getitem__
    assert sequence_breakers(["\n", "", ":"], tokens, encode) == {1: [()], 2: [()], 8: [()]}
    assert sequence_breakers(["bc"], tokens, encode) == {3: [()], 4: [(5,)], 7: [(5,)]}
    assert sequence_breakers(["bcd"], tokens, encode) == {3: [(9,)], 4: [(6,)], 7: [(6,)]}
