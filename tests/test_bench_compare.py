"""The comparison of modes: its arithmetic with fixed numbers, and its sentences."""

from dataclasses import replace

import pytest
from test_bench import RESULT

from llamagraph.bench_compare import Anatomy, choice, compare, verdict

# A step of 150 launches that takes 300 us as a graph, 90 of them between launches.
ANATOMY = Anatomy(150, 300e3, 600.0, driver_ns=2e3, python_ns=3e3)


def result(mode, token_us, deviation_us=1.0, **fields):
    """Of 100 tokens at that time each."""
    n_queued = {"stream": 150, "partial": 61, "loop": 0}.get(mode, 1)
    host = {"stream": 750.0}.get(mode, 5.0)
    return replace(RESULT, **{"graph_mode": mode, "avg_ns": round(1e5 * token_us), "n_gen": 100,
                              "n_prompt": 0, "stddev_ns": round(1e5 * deviation_us),
                              "n_launches": 150, "n_queued": n_queued, "prepare_ms": 4.0,
                              "host_us_per_token": host, "graph_bytes": 1_200_000, **fields})


def test_a_tokens_time_is_cut_in_three():
    c = compare([result("stream", 760), result("capture", 302), result("build", 200)], ANATOMY)
    parts = {r.graph_mode: (r.busy_ns, r.gaps_ns, r.waits_ns) for r in c.rows}
    assert parts["stream"] == pytest.approx((210e3, 90e3, 460e3))
    assert parts["capture"] == pytest.approx((210e3, 90e3, 2e3))
    assert parts["build"] == (200e3, 0, 0)  # side by side: less than one by one
    assert all(sum(p) == pytest.approx(r.token_ns) for p, r in zip(parts.values(), c.rows,
                                                                   strict=True))


def test_what_making_costs_is_paid_by_what_is_saved():
    c = compare([result("stream", 760), result("capture", 360, prepare_ms=4.1),
                 result("partial", 800), result("build", 759.5)], ANATOMY)
    assert c.row("capture").pays_after == 11  # 4.1 ms at 400 us a token
    assert c.row("partial").pays_after == -1 and c.row("build").pays_after == -1
    assert [c.row(m).launches_saved for m in ("stream", "capture", "partial")] == [0, 149, 89]


def test_the_stream_goes_first_and_a_refused_mode_counts_once():
    c = compare([result("capture", 300), result("stream", 760), result("stream", 900)], ANATOMY)
    assert [(r.graph_mode, r.token_ns) for r in c.rows] == [("stream", 760e3), ("capture", 300e3)]


@pytest.mark.parametrize("times, best", [
    ({"stream": 760, "capture": 302, "build": 301, "loop": 300}, "capture"),
    ({"stream": 760, "capture": 302, "build": 280, "loop": 290}, "build"),
    ({"stream": 304, "capture": 302, "build": 303, "loop": 301}, "stream"),
    ({"stream": 300, "capture": 302, "build": 310, "loop": 350}, "stream"),
    ({"stream": 700, "capture": 500, "build": 550, "loop": 300}, "loop"),
])
def test_the_simplest_mode_that_no_other_beats_is_chosen(times, best):
    assert choice([compare([result(m, t) for m, t in times.items()], ANATOMY)]) == best


def test_a_gain_within_the_scatter_is_none():
    stream, capture = result("stream", 330, 20), result("capture", 302, 20)
    c = compare([stream, capture], ANATOMY)
    assert choice([c]) == "stream" and c.row("capture").pays_after == -1


def test_depths_are_weighed_together():
    shallow = compare([result("stream", 760), result("capture", 302)], ANATOMY)
    deep = compare([result("stream", 990, n_depth=4096), result("capture", 1000, n_depth=4096)],
                   ANATOMY)
    assert choice([shallow, deep]) == "capture" and choice([deep]) == "stream"
    lines = "\n".join(verdict([shallow, deep]))
    assert "Use capture: 0.99 to 2.52 times" in lines
    assert "capture loses against the stream: tg100 @ d4096 by 1 %" in lines
    assert "not paid for at tg100 @ d4096" in lines


def test_the_verdict_says_what_every_figure_is():
    modes = [result("stream", 760), result("capture", 302), result("partial", 800)]
    assert verdict([compare(modes, ANATOMY)]) == [
        "Use capture: 2.52 times the stream's speed.",
        "It saves 149 of 150 launches a token; making it takes 4.0 ms and 1.2 MB, paid for after "
        "9 tokens.",
        "tg100: of the stream's 760 us a token the device computes for 210 us, 150 launches cost "
        "it 90 us, and 460 us it waits; with capture 302 us, of which it waits 2 us.",
        "tg100: launching costs the host 750 us a token from Python, 300 us of them the "
        "driver's own (2.0 us a launch): a stream launched from C would take at least 300 us a "
        "token, capture takes 302 us.",
        "partial loses against the stream: tg100 by 5 %.",
    ]


def test_a_host_that_is_ahead_needs_no_other_language():
    c = compare([result("stream", 900), result("capture", 302)], ANATOMY)
    assert "the device takes 900 us for what it is launched" in "".join(verdict([c]))


def test_the_price_is_that_of_the_case_that_pays_last():
    shallow = compare([result("stream", 760), result("capture", 302)], ANATOMY)
    deep = compare([result("stream", 760, n_launches=180, n_queued=180, n_depth=4096),
                    result("capture", 700, n_launches=180, graph_bytes=0, n_depth=4096)], ANATOMY)
    assert ("It saves 179 of 180 launches a token; making it takes 4.0 ms and 1.2 MB, paid for "
            "after 67 tokens.") in verdict([shallow, deep])


def test_where_no_graph_is_faster_the_stream_is_advised():
    c = compare([result("stream", 301), result("capture", 302)], replace(ANATOMY, driver_ns=None))
    first, second = verdict([c])
    assert first == "Use stream: no graph is faster here by more than the times scatter."
    assert "with capture 302 us" in second
