"""Llama 1 to 3, Mistral, SmolLM2, TinyLlama: the plain decoder. Pairs for rope are neighbours."""

from collections.abc import Sequence
from typing import Any

from llamagraph.kernels.attention import LayerKV, attention
from llamagraph.kernels.embed import embed
from llamagraph.kernels.head import head
from llamagraph.kernels.mlp import mlp
from llamagraph.models.config import Config, read_config
from llamagraph.program.tape import Tape
from llamagraph.program.weights import Weights


def config(metadata: Any) -> Config:
    return read_config(metadata, neox=False)


def step(tape: Tape, w: Weights, kv: Sequence[LayerKV], cfg: Config) -> None:
    hidden = embed(tape, w.token_embd, cfg.embd_scale)  # (rows, n_embd)
    for i, shape in enumerate(cfg.layers):
        with tape.scope(f"blk.{i}"):
            inv_freq = getattr(w.rope, cfg.rope_of[i]).weight
            attention(tape, hidden, w.blk[i], shape, kv[i], inv_freq, cfg.eps)
            mlp(tape, hidden, w.blk[i], cfg.eps, cfg.act)
    output = w.output if "output" in w else w.token_embd
    head(tape, hidden, w.output_norm, output, cfg.eps, cfg.logit_softcap)
