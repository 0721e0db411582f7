"""Whether independent launches side by side are faster than a chain: q, k and v of three types.

Such products are three launches of a layer. `build` and `loop` run them side by side, and where
they join the next one waits for all; `capture` is a chain whose launches start early. Needs no
file.
"""

from contextlib import closing
from dataclasses import replace
from typing import Any

from checks.report import Report
from llamagraph.bench import Case, bench
from llamagraph.devices import open_device
from llamagraph.gguf.synthetic import SyntheticFile

TYPES = {"attn_k": "Q5_K", "attn_v": "Q6_K"}  # attn_q has the model's own
MODELS = ("1b:q4_k_m", "8b:q4_k_m")
MODES = ("capture", "build", "loop")


class MixedFile(SyntheticFile):
    """Every layer's q, k and v of three types: no launch does all of them."""

    def _info(self, i: int, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        part = name.split(".")[-2]
        return super()._info(i, name, shape, TYPES.get(part, dtype))


def run(report: Report) -> None:
    for spec in MODELS:
        with report.check("branches", spec), closing(open_device("cuda", warn=print)) as device:
            planned, found = device.target, {}
            for pdl in (True, False) if planned.pdl else (False,):
                device.target = replace(planned, pdl=pdl)
                for r in bench(MixedFile(spec), device, [Case(0, 256)], MODES, 5):
                    found[f"{r.graph_mode}{', early starts' if pdl else ''}"] = r
            times = {name: r.avg_ns / 256e3 for name, r in found.items()}
            report.add("branches", f"decode of 256 tokens, {spec}, q, k and v of three types",
                       len({r.last_token for r in found.values()}) == 1,
                       "; ".join(f"{name}: {us:.1f} us" for name, us in times.items()))
