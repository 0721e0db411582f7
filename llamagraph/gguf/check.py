"""Whether every number of a model is one: what --check-tensors does. Knows no layer's meaning."""

from collections.abc import Callable

import numpy as np

from llamagraph.errors import FormatError
from llamagraph.gguf.reader import GGUFFile

WEIGHTS_AT_ONCE = 1 << 24  # as float32


def check_tensors(file: GGUFFile,
                  progress: Callable[[str, int, int], None] | None = None) -> None:
    """Reads every tensor; FormatError for the first with a weight that is infinite or no number."""
    total, done = sum(t.n_bytes for t in file.tensors.values()), 0
    for name, tensor in file.tensors.items():
        width = tensor.shape[-1]
        raw = file.data(name).reshape(-1, tensor.quant.row_bytes(width))
        n_rows = max(1, WEIGHTS_AT_ONCE // width)
        for first in range(0, len(raw), n_rows):
            rows = raw[first : first + n_rows]
            if progress:
                progress("check", done, total)
            if not np.isfinite(tensor.quant.dequantise(rows, (len(rows), width))).all():
                raise FormatError(f"{file.path}: tensor {name} holds numbers that are not finite; "
                                  "download or convert it again")
            done += rows.size
    if progress:
        progress("check", total, total)
