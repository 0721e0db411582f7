"""Draws comparisons of graph modes as one HTML page that needs nothing else.

The page's own text is `bench_page.html`; this adds the data. Knows no device.
"""

from collections.abc import Sequence
from typing import Any

from llamagraph.bench_compare import Compared, Comparison, choice, verdict
from llamagraph.html_page import fill


def page(models: Sequence[Sequence[Comparison]], title: str) -> str:
    """The page: each model's times by mode and depth, a token by kernel, bytes against time."""
    return fill("bench_page.html", title,
                {"models": [_model(comparisons) for comparisons in models]})


def _model(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    return {"name": comparisons[0].stream.model_type, "choice": choice(comparisons),
            "verdict": verdict(comparisons), "cases": [_case(c) for c in comparisons]}


def _case(c: Comparison) -> dict[str, Any]:
    """Times in microseconds."""
    return {
        "name": c.stream.name, "gb_per_s": c.stream.read_gb_per_s, "gap": c.anatomy.gap_ns / 1e3,
        "rows": [_row(r) for r in c.rows],
        "timeline": [[t.label, t.kernel, round(t.ns / 1e3, 3), t.n_bytes]
                     for t in c.anatomy.timeline],
    }


def _row(r: Compared) -> dict[str, Any]:
    return {
        "mode": r.graph_mode, "ts": r.avg_ts, "token": r.token_ns / 1e3,
        "spread": r.stddev_ns / r.n_gen / 1e3, "busy": r.busy_ns / 1e3, "gaps": r.gaps_ns / 1e3,
        "waits": r.waits_ns / 1e3, "host": r.host_us_per_token, "queued": r.n_queued,
        "make": r.prepare_ms, "mb": r.graph_bytes / 1e6, "pays": r.pays_after,
    }
