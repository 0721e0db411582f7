"""llamagraph runs GGUF language models, every decode step as one visible CUDA graph.

    import llamagraph
    with llamagraph.open() as model:
        for id, text in model.generate("Once upon a time", limit=20):
            print(text, end="", flush=True)
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["LlamaGraphError", "Model", "load_tokenizer", "open"]

_HOMES = {"open": "model", "Model": "model", "load_tokenizer": "model", "LlamaGraphError": "errors"}


def __getattr__(name: str) -> Any:
    """The public names, imported at their first use: numpy need not load for `--version`."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"llamagraph.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'llamagraph' has no attribute {name!r}")
