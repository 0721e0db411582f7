"""Attention of many query rows: blocks share the rows (`csrc/attention_rows.cu`). Knows no chunk
rule and no model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llamagraph.kernels.attend import Scoring, attend
from llamagraph.kernels.attention_few import inputs, kv_traffic
from llamagraph.program.launch import Buffer, Geometry, In, Out, Traffic, Work, kernel

NUMPY_CHUNK = 256  # positions that numpy takes at a time


def _geometry(target: Any, q: Buffer, *args: Any, N_HEAD: int, HEAD_DIM: int, **constants: Any
              ) -> Geometry:
    block_rows = 64 if HEAD_DIM <= 128 else 32
    return Geometry((-(-q.shape[0] // block_rows), N_HEAD, 1), 128)


def _cost(work: Work, q: Buffer, cache_k: Buffer, *args: Any, **constants: Any) -> Traffic:
    return kv_traffic(work, q, cache_k, args[-2])


_EXAMPLES = (  # heads, KV heads, head_dim, rows, n_rows, pos, slots, softcap, window
    (9, 3, 64, 32, 32, 0, 128, 0.0, 0),
    (9, 3, 64, 128, 33, 200, 256, 0.0, 0),
    (2, 2, 80, 128, 100, 900, 640, 0.0, 200),
    (4, 1, 96, 32, 9, 70, 128, 30.0, 0),
    (8, 2, 128, 512, 512, 37, 640, 0.0, 0),
    (4, 1, 256, 128, 128, 1000, 768, 50.0, 64),
)


def _example(rng: Any) -> Iterator[tuple[tuple, dict]]:
    for n_head, n_head_kv, dim, rows, n, pos, slots, softcap, window in _EXAMPLES:
        q, k, v = inputs(rng, n_head, n_head_kv, dim, "F16", rows, slots)
        where = np.array([pos], np.int32), np.array([n], np.int32)
        yield (q, k, v, *where, np.empty_like(q), dim**-0.5, softcap, window, slots), {
            "N_HEAD": n_head, "N_HEAD_KV": n_head_kv, "HEAD_DIM": dim, "KV": "F16",
        }


@kernel("attention_rows.cu", geometry=_geometry, cost=_cost, example=_example)
def attention_rows(q: In, cache_k: In, cache_v: In, pos: In, n_rows: In, out: Out, scale: float,
                   softcap: float, window: int, n_slots: int, *, N_HEAD: int, N_HEAD_KV: int,
                   HEAD_DIM: int, KV: str) -> None:
    """Row r sees the positions up to pos + r, the last `window` of them if not 0.

    q, out: (rows, N_HEAD * HEAD_DIM); caches: (n_slots, N_HEAD_KV, HEAD_DIM). Over a cache of
    halves, scaled queries and weights are halves too.
    """
    n, how = n_rows[0], Scoring(scale, softcap, window)
    out[:n] = attend(q[:n], cache_k, cache_v, int(pos[0]), how, NUMPY_CHUNK, KV == "F16")
