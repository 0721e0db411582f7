"""The attention operation: which kernels attend over the KV cache, and what comes before and after.

On a GPU a step of one row, or of few over a short KV, is norm and products, one launch for all
that its positions need and the attention itself, and the output product. Knows no device, no file
and no model.
"""

from dataclasses import dataclass
from typing import Any

from llamagraph.errors import LlamaGraphError
from llamagraph.kernels.attend import MAX_CHUNKS, chunk_length
from llamagraph.kernels.attention_few import (
    BLOCKS,
    HEADS,
    attention_combine,
    attention_decode,
    attention_split,
)
from llamagraph.kernels.attention_rows import (
    attention_plain,
    attention_rows,
    attention_rows_combine,
    attention_rows_combine_panels,
    attention_rows_split,
    attention_wgmma,
    attention_wgmma_split,
    queries_of_block,
    runs_on_wgmma,
)
from llamagraph.kernels.linear import from_panels, linear, linear_residual, met, qkv
from llamagraph.kernels.norm import norm_add, norm_heads
from llamagraph.kernels.panels import panels
from llamagraph.kernels.rope import store
from llamagraph.kernels.rope_attention import rope_attention_decode, rope_attention_split
from llamagraph.kernels.rope_attention_few import (
    MOST_ROWS,
    QUERIES,
    rope_attention_few,
    rope_attention_few_panels,
    takes_few,
)
from llamagraph.kernels.step import N_COUNTERS
from llamagraph.program.launch import Buffer
from llamagraph.program.tape import Tape
from llamagraph.program.target import Target
from llamagraph.program.weights import Weights

FEW_KV = 192  # below this KV length a block of few rows walks over all of it
LONG_KV = 2048  # from this KV length on, chunks are combined by a kernel of their own
ROWS_CHUNK = 256  # positions of a chunk at least, where several rows share it
MOST_ROWS_CHUNKS = 32
LARGEST_HEAD = 256  # that the registers of a GPU's threads have room for


@dataclass(frozen=True)
class AttentionShape:
    """What a layer's attention looks like. `window` 0 sees everything, `softcap` 0 caps nothing."""

    n_head: int
    n_head_kv: int
    head_dim: int
    scale: float
    neox: bool = False
    mscale: float = 1.0
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class LayerKV:
    """A layer's part of the KV cache: k and v are (n_slots, n_head_kv, head_dim), as in `kv`."""

    k: Buffer
    v: Buffer


def smallest_chunk(target: Target) -> int:
    return 128 if target.is_cuda else 256


def warps_of_block(attention: str, head_dim: int) -> int:
    """Of the blocks that share the chunks: eight end a chunk soonest. Those of long heads take so
    many registers that no second block has room; where many chunks wait, two of four warps have."""
    return 4 if attention == "long" and head_dim > 64 else 8


def attention_class(kv_len: int, rows: int = 1) -> str:
    """The depth class of a StepKey; where there are many rows the depth is all the same.

    Few rows have two classes everywhere, also where no kernel makes a difference of them.
    """
    limit = LONG_KV if rows == 1 else FEW_KV
    return "short" if rows > MOST_ROWS or kv_len < limit else "long"


def attention_vars(target: Target, kv_len: int) -> dict[str, int]:
    """How many blocks share the chunks: a power of two, so that it changes ever more seldom."""
    chunk = smallest_chunk(target)
    chunks = -(-kv_len // chunk_length(kv_len, chunk))
    return {BLOCKS.name: 1 << (chunks - 1).bit_length()}


def _constants(shape: AttentionShape, kv: LayerKV) -> dict[str, Any]:
    return {"N_HEAD": shape.n_head, "N_HEAD_KV": shape.n_head_kv, "HEAD_DIM": shape.head_dim,
            "TYPE_K": kv.k.dtype, "TYPE_V": kv.v.dtype}


def _chunked(tape: Tape, shape: AttentionShape, kv: LayerKV) -> dict[str, Any]:
    """The constants of kernels that cut the KV into chunks."""
    return {**_constants(shape, kv), "CHUNK": smallest_chunk(tape.target),
            "MAX_CHUNKS": MAX_CHUNKS, "WARPS": warps_of_block(tape.key.attention, shape.head_dim)}


def _partials(tape: Tape, shape: AttentionShape) -> Buffer:
    """Room for every chunk's result: see `attention_split`."""
    rows, shares = tape.key.rows, -(-shape.n_head // shape.n_head_kv // HEADS)
    assert rows * shape.n_head_kv * shares <= N_COUNTERS
    return tape.scratch("attn_partials", rows, shape.n_head, MAX_CHUNKS * (shape.head_dim + 2))


def _combine(tape: Tape, shape: AttentionShape, kv: LayerKV, partials: Buffer, out: Buffer
             ) -> None:
    tape.launch(attention_combine(**_chunked(tape, shape, kv)), partials, tape.io["pos"],
                tape.io["n_rows"], out, shape.window, label="attn_combine", variant="split",
                reason="a block a head", stable=False)


def _attend(tape: Tape, q: Buffer, shape: AttentionShape, kv: LayerKV, output: Weights) -> Buffer:
    """Chooses how the work is shared: by rows, or by chunks of the KV.

    The result is in panels where a kernel writes them and the weight `output` takes them.
    """
    io, rows = tape.io, tape.key.rows
    seen = (q, kv.k, kv.v, io["pos"], io["n_rows"])
    how = (shape.scale, shape.softcap, shape.window, kv.k.shape[0])
    if rows > 1:
        return _attend_rows(tape, seen, how, shape, kv, output)
    out = tape.scratch("attn_out", *q.shape)
    constants, partials = _chunked(tape, shape, kv), _partials(tape, shape)
    if tape.key.attention == "short":
        tape.launch(attention_decode(**constants), *seen, partials, io["counters"], out, *how,
                    label="attn", variant="decode",
                    reason=f"one row, KV below {LONG_KV}: the last block combines", stable=False)
        return out
    tape.launch(attention_split(**constants), *seen, partials, *how, label="attn",
                variant="split", reason=f"one row, KV from {LONG_KV}", stable=False)
    _combine(tape, shape, kv, partials, out)
    return out


def _attend_rows(tape: Tape, seen: tuple, how: tuple, shape: AttentionShape, kv: LayerKV,
                 output: Weights) -> Buffer:
    """Blocks share queries and KV heads; where these leave most of the machine idle, the KV too."""
    target, (rows, width) = tape.target, seen[0].shape
    if not target.is_cuda:
        out = tape.scratch("attn_out", rows, width)
        tape.launch(attention_plain(**_constants(shape, kv)), *seen, out, *how, label="attn",
                    variant="plain", reason=f"{rows} rows in one product", stable=False)
        return out
    fast = target.name == attention_wgmma.arch
    fast = fast and runs_on_wgmma(shape.head_dim, kv.k.dtype, kv.v.dtype)
    queries = 128 if fast else queries_of_block(shape.head_dim)
    constants = {**_constants(shape, kv), "QUERIES": queries}
    blocks = -(-rows * (shape.n_head // shape.n_head_kv) // queries) * shape.n_head_kv
    n_chunks = min((1 if fast else 2) * target.n_sm // blocks // 2 * 2, MOST_ROWS_CHUNKS)
    variant = "wgmma" if fast else "rows"
    if n_chunks < 2:
        one = attention_wgmma if fast else attention_rows
        out = tape.scratch("attn_out", rows, width)
        tape.launch(one(**constants), *seen, out, *how, label="attn", variant=variant,
                    reason=f"{rows} rows: {blocks} blocks", stable=False)
        return out
    chunks = tape.scratch("attn_chunks", rows, shape.n_head, n_chunks * (shape.head_dim + 2))
    split = attention_wgmma_split if fast else attention_rows_split
    tape.launch(split(**constants, CHUNK=ROWS_CHUNK, MAX_CHUNKS=n_chunks), *seen, chunks, *how,
                label="attn", variant=f"{variant} split", stable=False,
                reason=f"{rows} rows are {blocks} blocks: the KV in up to {n_chunks} chunks")
    in_panels = from_panels(tape, rows, *met(output))
    out = (panels(tape, "attn_out", rows, width) if in_panels
           else tape.scratch("attn_out", rows, width))
    combine = attention_rows_combine_panels if in_panels else attention_rows_combine
    constants = {"N_HEAD": shape.n_head, "HEAD_DIM": shape.head_dim, "MAX_CHUNKS": n_chunks}
    tape.launch(combine(**constants), chunks, tape.io["n_rows"], out, label="attn_combine",
                variant="panels" if in_panels else "rows", reason="four numbers a thread",
                stable=False)
    return out


def _rope_attend(tape: Tape, heads: tuple[Buffer, Buffer, Buffer], w: Weights,
                 shape: AttentionShape, kv: LayerKV, inv_freq: Buffer, eps: float) -> Buffer:
    """One row: norms of q and k, rope, the write of k and v and the attention in a launch."""
    io, normed = tape.io, "attn_q_norm" in w
    out, partials = tape.scratch("attn_out", *heads[0].shape), _partials(tape, shape)
    norms = (w.attn_q_norm.weight, w.attn_k_norm.weight) if normed else (inv_freq, inv_freq)
    seen = (*heads, *norms, inv_freq, io["pos"], kv.k, kv.v, partials)
    how = (shape.scale, shape.softcap, shape.mscale, eps, shape.window, kv.k.shape[0])
    constants = {**_chunked(tape, shape, kv), "N_ROT": 2 * inv_freq.shape[0],
                 "NEOX": int(shape.neox), "QK_NORM": int(normed)}
    why = f"one row, with rope{' and norms' if normed else ''} and the write of k and v"
    if tape.key.attention == "short":
        tape.launch(rope_attention_decode(**constants), *seen, io["counters"], out, *how,
                    label="attn", variant="rope decode",
                    reason=f"{why}; KV below {LONG_KV}: the last block combines", stable=False)
        return out
    tape.launch(rope_attention_split(**constants), *seen, *how, label="attn",
                variant="rope split", reason=f"{why}; KV from {LONG_KV}", stable=False)
    _combine(tape, shape, kv, partials, out)
    return out


def _few(tape: Tape, shape: AttentionShape, kv: LayerKV, inv_freq: Buffer) -> bool:
    """Whether few rows have rope, the write of k and v and the attention in a launch."""
    return tape.key.attention == "short" and takes_few(
        tape.target, tape.key.rows, shape.head_dim, 2 * inv_freq.shape[0],
        (kv.k.dtype, kv.v.dtype))


def _rope_attend_few(tape: Tape, heads: tuple[Buffer, Buffer, Buffer], shape: AttentionShape,
                     kv: LayerKV, inv_freq: Buffer, output: Weights) -> Buffer:
    """The result is in panels if the weight `output` takes them."""
    io, (rows, width) = tape.io, heads[0].shape
    constants = {**_constants(shape, kv), "N_ROT": 2 * inv_freq.shape[0], "NEOX": int(shape.neox),
                 "ROWS": rows, "QUERIES": QUERIES}
    chosen, out = rope_attention_few(**constants), tape.scratch("attn_out", rows, width)
    if from_panels(tape, rows, *met(output)):
        chosen = rope_attention_few_panels(**constants, PANELS=1)
        out = panels(tape, "attn_out", rows, width)
    tape.launch(chosen, *heads, inv_freq, io["pos"], io["n_rows"], kv.k, kv.v, out, shape.scale,
                shape.softcap, shape.mscale, shape.window, kv.k.shape[0], label="attn",
                variant="rope few", stable=False,
                reason=f"{rows} rows, with rope and the write of k and v; KV below {FEW_KV}")
    return out


def _check(tape: Tape, w: Weights, shape: AttentionShape) -> None:
    """LlamaGraphError where a GPU has no kernel for the heads."""
    fits = shape.head_dim % 16 == 0 and shape.head_dim <= LARGEST_HEAD
    if tape.target.is_cuda and not fits:
        raise LlamaGraphError(
            f"{w.where}: heads of {shape.head_dim} numbers; a GPU takes multiples of 16 up to "
            f"{LARGEST_HEAD}; use --device cpu"
        )


def attention(tape: Tape, hidden: Buffer, w: Weights, shape: AttentionShape, kv: LayerKV,
              inv_freq: Buffer, eps: float) -> None:
    """hidden += output(attention(norm(hidden))), with the layer's q, k and post norms if any."""
    _check(tape, w, shape)
    q, k, v = qkv(tape, hidden, w, eps)
    norms = [(x, name) for x, name in ((q, "attn_q_norm"), (k, "attn_k_norm")) if name in w]
    if tape.target.is_cuda and tape.key.rows == 1 and len(norms) != 1:
        out = _rope_attend(tape, (q, k, v), w, shape, kv, inv_freq, eps)
    else:
        for x, name in norms:
            norm_heads(tape, x, getattr(w, name), eps)
        if _few(tape, shape, kv, inv_freq):
            out = _rope_attend_few(tape, (q, k, v), shape, kv, inv_freq, w.attn_output)
        else:
            store(tape, q, k, v, inv_freq, kv.k, kv.v, neox=shape.neox, mscale=shape.mscale)
            out = _attend(tape, q, shape, kv, w.attn_output)
    if "post_attention_norm" in w:
        norm_add(tape, linear(tape, out, w.attn_output), w.post_attention_norm, hidden, eps)
    else:
        linear_residual(tape, out, w.attn_output, hidden)
