"""The drawn graph: all that was planned is in it, and it works in a browser at two sizes."""

import json
import re

import pytest
from click.testing import CliRunner
from tiny import tiny_model

from llamagraph.cli import cli
from llamagraph.gguf.reader import GGUFFile
from llamagraph.gguf.synthetic import SyntheticFile
from llamagraph.inspection import Setting, inspect
from llamagraph.inspection_page import dot, page
from llamagraph.planner import Planner
from llamagraph.program.target import target_named


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=1024, n_layer=3)


@pytest.fixture(scope="module")
def planner(path):
    return Planner(GGUFFile(path), target_named("numpy"))


def invoke(*arguments):
    return CliRunner().invoke(cli, ["inspect-graph", *map(str, arguments)])


def test_the_page_holds_all_and_needs_nothing(tmp_path, path):
    file = tmp_path / "graph.html"
    invoke("-m", path, "--target", "numpy", "--html", file)
    text = file.read_text()
    assert not re.search(r"https?://|<link|src=|@import|url\((?!#)", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    planned = json.loads(invoke("-m", path, "--target", "numpy", "--json").stdout)
    assert [n["label"] for n in data["nodes"]] == [n["label"] for n in planned["nodes"]]


def test_a_title_cannot_break_the_page(planner):
    text = page(inspect(planner, Setting()), "</script><b>\"")
    assert "</script><b>" not in text and text.count("</script>") == 2
    assert dot(inspect(planner, Setting()), 'a"b').startswith('digraph "a\\"b"')


@pytest.mark.parametrize("spec", ["135m:q8_0", "70b:q4_k_m"])
def test_search_fold_and_hover_in_a_browser(tmp_path, browser, spec):
    planner = Planner(SyntheticFile(spec), target_named("numpy"), 4096)
    found, file = inspect(planner, Setting(), 600), tmp_path / "graph.html"
    file.write_text(page(found, spec), "utf-8")
    browser.open(file)
    n_layers = planner.config.n_layer
    assert browser.count(".head") == n_layers and browser.count(".node") == 4

    browser.point('[data-group="4"]', press=True)  # blk.3
    assert browser.count(".node") == 4 + 12 and browser.count(".frame") == 1
    browser.point(f'[data-node="{1 + 3 * 12 + 5}"]')
    facts = browser.js("return document.getElementById('facts').innerText")
    (attn,) = (n for n in found.nodes if n.label == "blk.3.attn")
    for text in (attn.label, attn.kernel, attn.reason, "n_attn_blocks", "cache_k.3",
                 f"CHUNK={attn.constants['CHUNK']}"):
        assert text in facts
    assert browser.count(".edge.on") == 2
    browser.point('[data-group="4"]', press=True)
    assert browser.count(".node") == 4 and browser.count(".frame") == 0

    browser.type("/blk.7.ffn_up")
    found_text = "return document.getElementById('count').textContent"
    assert browser.js(found_text) == "2 found"  # the product and what reads it
    assert browser.count(".head.found") == 1
    browser.type("\ue007")  # Enter
    assert browser.count(".node.found.current") == 1
    middle = browser.js("const b = document.querySelector('.current').getBoundingClientRect(),"
                        "s = document.getElementById('graph').getBoundingClientRect();"
                        "return [b.x + b.width/2 - s.x - s.width/2,"
                        " b.y + b.height/2 - s.y - s.height/2]")
    assert max(map(abs, middle)) < 2
    browser.type("\ue00c")  # Escape

    browser.point("#unfold", press=True)
    assert browser.count(".node") == len(found.nodes)
    assert browser.count(".edge") == len(found.edges)
    browser.point("#fold", press=True)
    assert browser.count(".node") == 4
    before = browser.js("return document.getElementById('view').getAttribute('transform')")
    browser.point("#in", press=True)
    assert browser.js("return document.getElementById('view').getAttribute('transform')") != before


def test_small_graphs_are_drawn_unfolded(tmp_path, browser, planner):
    file = tmp_path / "graph.html"
    file.write_text(page(inspect(planner, Setting()), "tiny"), "utf-8")
    browser.open(file)
    assert browser.count(".node") == len(inspect(planner, Setting()).nodes)
