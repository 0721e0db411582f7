"""What a measurement says of itself besides its numbers: the build, the machine, the model.

Under llama-bench's field names. Knows no case and no mode.
"""

import math
import platform
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from llamagraph import __version__
from llamagraph.gguf.reader import GGUFFile
from llamagraph.runner import Runner


def facts(file: GGUFFile, runner: Runner) -> dict[str, Any]:
    """The fields that say what was measured on what; sizes in bytes."""
    sizes = Counter[str]()
    for t in file.tensors.values():
        sizes[t.quant.name] += t.n_bytes
    gpu, kv = getattr(runner.device, "gpu", None), runner.kv.layers[0]
    commit, number = build()
    return {
        "build_commit": commit, "build_number": number,
        "cpu_info": _cpu_name(), "gpu_info": gpu.name if gpu else "",
        "backends": runner.device.name.upper(),
        "model_filename": str(file.path), "model_type": _model_type(file, sizes),
        "model_size": sizes.total(), "model_n_params": _n_params(file),
        "l2_persist": runner.device.target.l2_persist,
        "type_k": kv.k.dtype.lower(), "type_v": kv.v.dtype.lower(),
    }


def build(package: Path = Path(__file__).parent) -> tuple[str, int]:
    """The commit of a checkout and how many there are up to it; elsewhere the version and 0."""
    root = package.parent
    if not (root / ".git").exists():  # installed, perhaps inside somebody else's repository
        return __version__, 0
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        return commit, int(_git(root, "rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return __version__, 0


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True,
                          check=True)
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def _n_params(file: GGUFFile) -> int:
    return sum(math.prod(t.shape) for t in file.tensors.values())


def _model_type(file: GGUFFile, sizes: Counter[str]) -> str:
    """Architecture, parameters and the type that most bytes have: llama 8B Q4_K."""
    n, (quant, _) = _n_params(file), sizes.most_common(1)[0]
    count = f"{n / 1e9:.2g}B" if n >= 1e9 else f"{n / 1e6:.3g}M"
    return f"{file.metadata['general.architecture']} {count} {quant}"
