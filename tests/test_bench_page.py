"""The page of a comparison: all that was measured is in it, and it works in a browser."""

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from test_bench_compare import ANATOMY, result
from tiny import tiny_model

from llamagraph.bench_compare import Timed, compare
from llamagraph.bench_page import page
from llamagraph.cli import cli

KERNELS = {"attn_qkv": ("gemv_norm_qkv", 2e3, 6_000_000), "attn": ("attention_decode", 3e3, 9000),
           "ffn_down": ("gemv_add", 2.5e3, 9_000_000)}
TIMELINE = tuple(Timed(f"blk.{i}.{name}", *facts) for i in range(50)
                 for name, facts in KERNELS.items())


def comparison(depth=0, timeline=TIMELINE, **fields):
    times = {"stream": 760, "capture": 380 + depth / 100, "partial": 800}
    return compare([result(m, t, n_depth=depth, **fields) for m, t in times.items()],
                   replace(ANATOMY, timeline=timeline))


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "bench.html"
    other = [comparison(model_type="llama 8B Q4_K", timeline=())]
    made.write_text(page([[comparison(), comparison(4096)], other], "a <GPU>"), "utf-8")
    return made


def test_the_page_holds_all_and_needs_nothing(file):
    text = file.read_text()
    assert not re.search(r"https?://|<link|src=|@import|url\((?!#)", text)
    assert "a &lt;GPU&gt;" in text and text.count("</script>") == 2
    first, second = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])["models"]
    assert [c["name"] for c in first["cases"]] == ["tg100", "tg100 @ d4096"]
    assert [r["mode"] for r in first["cases"][0]["rows"]] == ["stream", "capture", "partial"]
    assert len(first["cases"][0]["timeline"]) == 150 and first["choice"] == "capture"
    assert second["name"] == "llama 8B Q4_K"


def test_plots_models_and_launches_in_a_browser(file, browser):
    browser.open(file)
    assert browser.count("rect.bar") == 2 * 3 * 3 and browser.count("#table tr") == 1 + 6
    widths = browser.js("return [...document.querySelectorAll('rect.bar')].slice(0, 3)"
                        ".map(e => +e.getAttribute('width'))")  # of the stream: busy, gaps, waits
    assert widths[1] / widths[0] == pytest.approx(90 / 210, rel=1e-3)
    assert widths[2] / widths[0] == pytest.approx(460 / 210, rel=1e-3)
    assert browser.count("rect.launch") >= 150 and browser.count("circle.dot") == 150
    ends = browser.js("return [...document.querySelectorAll('rect.launch')].map(e => "
                      "+e.getAttribute('x') + +e.getAttribute('width'))")
    assert max(ends) <= browser.js("return WIDTH")
    browser.js("document.querySelector('circle.dot').scrollIntoView({block: 'center'})")
    browser.point("circle.dot[data-launch='149']")
    facts = browser.js("return document.getElementById('dot-facts').textContent")
    assert "blk.49.ffn_down: gemv_add, 2.5 µs, 9.00 MB, 90 % of the bandwidth" in facts
    browser.js("scrollTo(0, 0)")
    browser.point("#models [data-at='1']", press=True)
    assert browser.count("rect.bar") == 3 * 3
    assert browser.js("return document.getElementById('launches').hidden")
    assert browser.js("return document.body.scrollWidth <= window.innerWidth")


def test_the_command_writes_the_page_and_says_the_verdict(tmp_path):
    model, html = tiny_model(tmp_path / "m.gguf"), tmp_path / "x.html"
    done = CliRunner().invoke(cli, [
        "bench", "-m", str(model), "--device", "cpu", "--compare", "-n", "4", "-d", "0,9", "-r",
        "1", "--html", str(html), "-o", "json"])
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)
    modes = list(dict.fromkeys(r["graph_mode"] for r in rows))
    assert modes[:4] == ["stream", "capture", "build", "partial"] and len(rows) == 2 * len(modes)
    for r in rows:
        parts = r["busy_ns"] + r["gaps_ns"] + r["waits_ns"]
        assert parts == pytest.approx(r["token_ns"]) == pytest.approx(r["avg_ns"] / 4)
    assert re.search(r"\nUse \w+: ", done.stderr)
    (found,) = json.loads(re.search(r'id="data">(.*?)</script>', html.read_text())[1])["models"]
    for case in found["cases"]:
        assert len(case["timeline"]) == rows[0]["n_launches"]
        assert case["timeline"][0][0] == "token_embd" and case["timeline"][0][2] > 0


@pytest.mark.parametrize("arguments, message", [
    (("--html", "x.html"), "--compare"), (("--compare", "-p", "8"), "leave out -p"),
    (("--compare", "-pg", "8,8"), "leave out -p"),
])
def test_what_cannot_be_compared_is_said(arguments, message):
    done = CliRunner().invoke(cli, ["bench", "--device", "cpu", *arguments])
    assert done.exit_code == 2 and message in done.stderr
