"""Gemma 3: five sliding-window layers to one that sees all, each kind with its own rope table.

Norms before and after each block, norms on q and k, GELU, scaled embeddings (arXiv:2503.19786).
The norm weights in the file already hold their + 1.
"""

import math
from dataclasses import replace
from typing import Any

from llamagraph.models.config import Config, Keys, Rope, read_config
from llamagraph.models.llama import step

__all__ = ["config", "step"]

FULL_EVERY = 6  # layers 5, 11, ... see the whole context
LAYERS_27B = 62  # this size scales scores by the width a head, not by the head's own size


def config(metadata: Any) -> Config:
    keys, cfg = Keys(metadata), read_config(metadata, neox=True, act="gelu")
    window = keys.positive("attention.sliding_window")
    full = [i % FULL_EVERY == FULL_EVERY - 1 for i in range(cfg.n_layer)]
    first = cfg.layers[0]
    scale = first.scale
    if cfg.n_layer == LAYERS_27B:
        scale = 1 / math.sqrt(cfg.n_embd / first.n_head)
    local = Rope(keys.number("rope.freq_base_swa", float, 10000.0), cfg.ropes["full"].n_rot)
    return replace(
        cfg,
        layers=tuple(
            replace(s, scale=scale, window=0 if sees_all else window,
                    mscale=s.mscale if sees_all else local.mscale)
            for s, sees_all in zip(cfg.layers, full, strict=True)
        ),
        ropes={**cfg.ropes, "local": local},
        rope_of=tuple("full" if sees_all else "local" for sees_all in full),
        embd_scale=math.sqrt(cfg.n_embd),
        norms=("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
        logit_softcap=keys.number("final_logit_softcapping", float, 0.0),
    )
