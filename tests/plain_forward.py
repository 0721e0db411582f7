"""A second, plain forward pass in float64, written from the papers: what the logits should be.

Reads the file with the `gguf` package and shares no code with the project.
"""

import math

import gguf
import numpy as np


class PlainModel:
    """All weights as float64, and one function: tokens to logits (n_tokens, n_vocab)."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.w = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type)
            .reshape(t.shape[::-1]).astype(np.float64)
            for t in reader.tensors
        }
        self.keys = {k: f.contents() for k, f in reader.fields.items()}
        self.arch = self.keys["general.architecture"]

    def key(self, name, default=None):
        return self.keys.get(f"{self.arch}.{name}", default)

    def norm(self, x, name):
        rms = np.sqrt((x**2).mean(-1, keepdims=True) + self.key("attention.layer_norm_rms_epsilon"))
        return x / rms * self.w[name + ".weight"]

    def dense(self, x, name):
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0.0)

    def frequencies(self, d, local):
        base = 10000.0 if local else self.key("rope.freq_base")
        freq = base ** (-np.arange(0, d, 2) / d)
        if "rope_freqs.weight" in self.w:
            freq = freq / self.w["rope_freqs.weight"]
        kind, factor = self.key("rope.scaling.type"), self.key("rope.scaling.factor", 1.0)
        if kind is None or local:
            return freq, 1.0
        if kind == "linear":
            return freq / factor, 1.0
        orig = self.key("rope.scaling.original_context_length")

        def dim(turns):
            return d * math.log(orig / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(0, math.floor(dim(32))), min(d - 1, math.ceil(dim(1)))
        keep = 1 - np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
        return freq / factor * (1 - keep) + freq * keep, 1 + 0.1 * math.log(factor)

    def rotate(self, x, local):
        """x: (tokens, heads, d)."""
        d = x.shape[-1]
        freq, scale = self.frequencies(d, local)
        angle = np.arange(len(x))[:, None] * freq
        turn = (np.exp(1j * angle) * scale)[:, None]
        if self.arch == "llama":
            z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            return np.stack([z.real, z.imag], -1).reshape(x.shape)
        z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    def attention(self, x, p, i):
        n = len(x)
        d = self.key("attention.key_length")
        local = self.arch == "gemma3" and i % 6 != 5
        q, k, v = (self.dense(x, f"{p}attn_{s}").reshape(n, -1, d) for s in "qkv")
        if p + "attn_q_norm.weight" in self.w:
            q, k = self.norm(q, p + "attn_q_norm"), self.norm(k, p + "attn_k_norm")
        q, k = self.rotate(q, local), self.rotate(k, local)
        out = np.zeros_like(q)
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            scores = q[:, h] @ k[:, g].T / math.sqrt(d)
            row, col = np.arange(n)[:, None], np.arange(n)
            hidden = col > row
            if local:
                hidden |= col <= row - self.key("attention.sliding_window")
            scores = np.where(hidden, -np.inf, scores)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = scores / scores.sum(-1, keepdims=True) @ v[:, g]
        return self.dense(out.reshape(n, -1), p + "attn_output")

    def mlp(self, x, p):
        gate = self.dense(x, p + "ffn_gate")
        if self.arch == "gemma3":
            act = gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            act = gate / (1 + np.exp(-gate))
        return self.dense(act * self.dense(x, p + "ffn_up"), p + "ffn_down")

    def logits(self, tokens):
        x = self.w["token_embd.weight"][tokens]
        gemma = self.arch == "gemma3"
        if gemma:
            x = x * math.sqrt(x.shape[1])
        for i in range(self.key("block_count")):
            p = f"blk.{i}."
            a = self.attention(self.norm(x, p + "attn_norm"), p, i)
            x = x + (self.norm(a, p + "post_attention_norm") if gemma else a)
            m = self.mlp(self.norm(x, p + "ffn_norm"), p)
            x = x + (self.norm(m, p + "post_ffw_norm") if gemma else m)
        out = self.w.get("output.weight", self.w["token_embd.weight"])
        return self.norm(x, "output_norm") @ out.T
