"""Tiny random models as GGUF files, made with the `gguf` package's writer."""

import pathlib

import gguf
import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
WORDS = ["he", "ll", "lo", "hell", "hello", " w", "or", "ld", " wor", " world"]
MERGES = ["h e", "l l", "l o", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
N_VOCAB = 256 + len(WORDS) + len(SPECIAL)
K_QUANTS = {"Q4_K": (0.0005, 0.004), "Q6_K": (0.0004, None)}


def byte_texts() -> list[str]:
    """The printable stand-ins that byte-level BPE gives the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(hidden)) for b in range(256)]


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(byte_texts() + [w.replace(" ", "Ġ") for w in WORDS] + SPECIAL)
    writer.add_token_types([1] * (256 + len(WORDS)) + [3] * len(SPECIAL))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(N_VOCAB - 1)
    writer.add_bos_token_id(N_VOCAB - 3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def random_blocks(rng: np.random.Generator, quant: str, shape: tuple[int, int]) -> np.ndarray:
    """Random bits of a K-quant with scales of a usual size, uint8 (rows, bytes)."""
    kind = gguf.GGMLQuantizationType[quant]
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0] * shape[1] // block, n_bytes), dtype=np.uint8)
    d, dmin = (None if s is None else np.float16(s).tobytes() for s in K_QUANTS[quant])
    if dmin is None:
        raw[:, -2:] = np.frombuffer(d, np.uint8)
    else:
        raw[:, :4] = np.frombuffer(d + dmin, np.uint8)
    return raw.reshape(shape[0], -1)


def add_weight(writer, rng, name: str, shape: tuple[int, ...], quant: str) -> None:
    if len(shape) == 1:
        values = rng.standard_normal(shape, np.float32) * 0.2
        writer.add_tensor(name, values + np.float32(not name.endswith("bias")))
    elif quant in K_QUANTS:
        raw = random_blocks(rng, quant, shape)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[quant])
    else:
        values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))
        kind = gguf.GGMLQuantizationType[quant]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def tiny_model(path: pathlib.Path, arch: str = "llama", quant: str = "F32", *, tied: bool = True,
               bias: bool = False, seed: int = 0, n_ctx: int = 512, n_layer: int = 2,
               rope_freqs: bool = False, scaling: str | None = None,
               sampling: dict[str, float] | None = None) -> pathlib.Path:
    """A model of that architecture: 4 heads (2 for keys), every matrix of one type."""
    rng = np.random.default_rng(seed)
    wide = quant in K_QUANTS
    n_embd, n_ff, n_head, n_head_kv = (256 if wide else 64), (256 if wide else 96), 4, 2
    q_dim = n_embd
    head_dim = q_dim // n_head
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    if arch == "gemma3":
        writer.add_sliding_window(24)
    for name, value in (sampling or {}).items():
        write = writer.add_int32 if isinstance(value, int) else writer.add_float32
        write(f"general.sampling.{name}", value)
    add_tokenizer(writer)

    def add(name, *shape):
        add_weight(writer, rng, name, shape, quant)

    add("token_embd.weight", N_VOCAB, n_embd)
    add("output_norm.weight", n_embd)
    if not tied:
        add("output.weight", N_VOCAB, n_embd)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight",
                          np.linspace(1, 8, head_dim // 2).astype(np.float32))
    for i in range(n_layer):
        p = f"blk.{i}."
        add(p + "attn_norm.weight", n_embd)
        for name, rows in (("q", q_dim), ("k", q_dim // 2), ("v", q_dim // 2)):
            add(f"{p}attn_{name}.weight", rows, n_embd)
            if bias or arch == "qwen2":
                add(f"{p}attn_{name}.bias", rows)
        add(p + "attn_output.weight", n_embd, q_dim)
        if arch in ("qwen3", "gemma3"):
            add(p + "attn_q_norm.weight", head_dim)
            add(p + "attn_k_norm.weight", head_dim)
        if arch == "gemma3":
            add(p + "post_attention_norm.weight", n_embd)
            add(p + "post_ffw_norm.weight", n_embd)
        add(p + "ffn_norm.weight", n_embd)
        add(p + "ffn_gate.weight", n_ff, n_embd)
        add(p + "ffn_up.weight", n_ff, n_embd)
        add(p + "ffn_down.weight", n_embd, n_ff)
        if bias:
            add(p + "attn_output.bias", n_embd)
            add(p + "ffn_down.bias", n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
