"""Makes tiny_bpe.json and tiny_spm.json: llama.cpp's ids of a few strings, over a cut vocabulary.

    make_tokenizer_cases.py GOLDEN_FOLDER SMOLLM2_FILE

A merge that never happens in these strings can be left out without changing a result, so each file
keeps only the tokens and merges that were looked up with success, renumbered, and the ids remain
those that llama.cpp gave for the whole vocabulary.
"""

import json
import sys
from pathlib import Path
from typing import Any

from llamagraph.gguf.reader import GGUFFile
from llamagraph.text import Tokenizer
from llamagraph.text.vocabulary import Kind

BPE_TEXTS = 24
SPM_TEXTS = 24
HERE = Path(__file__).parent


class Recorder(dict):
    """A dict that remembers which of its keys were asked for."""

    def __init__(self, values: dict) -> None:
        super().__init__(values)
        self.asked: set = set()

    def __contains__(self, key: object) -> bool:
        return self._note(key, super().__contains__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, default) if key in self else default

    def _note(self, key: object, found: bool) -> bool:
        if found:
            self.asked.add(key)
        return found


def cut(metadata: dict[str, Any], keep: set[str], cases: list[dict]) -> dict[str, Any]:
    """The file's vocabulary with only the kept tokens, and the cases with their new ids."""
    prefix = "tokenizer.ggml."
    old = [i for i, text in enumerate(metadata[prefix + "tokens"]) if text in keep]
    new = {before: after for after, before in enumerate(old)}
    small: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in (prefix + "tokens", prefix + "token_type", prefix + "scores"):
            small[key] = [getattr(value[i], "item", lambda text=value[i]: text)() for i in old]
        elif key.startswith(prefix) and key.endswith("_token_id"):
            small[key] = new[value]
        elif key.startswith(prefix) and isinstance(value, str | bool):
            small[key] = value
    for case in cases:
        for column in {"plain", "special", "bos"} & set(case):
            case[column] = [new[i] for i in case[column]]
    return {"metadata": small, "cases": cases}


def record(path: Path, texts: list[str]) -> tuple[dict[str, Any], set[str], set[str]]:
    """The file's metadata, and the tokens and merges looked up while the texts are encoded."""
    with GGUFFile(path) as file:
        metadata = dict(file.metadata)
    tokenizer = Tokenizer(metadata, path.name)
    model: Any = tokenizer._model
    model._ids = Recorder(model._ids)
    ranks = Recorder(getattr(model, "_ranks", {}))
    if ranks:
        model._ranks = ranks
    used = {i for text in texts for i in tokenizer.encode(text, True, True)}
    used |= {i for text in texts for i in tokenizer.encode(text, False, False)}
    named = {v for k, v in metadata.items() if k.endswith("_token_id")} | used
    tokens = {tokenizer.token_text(i) for i in named} | model._ids.asked
    kinds = tokenizer.vocabulary.kinds
    for text, i in tokenizer.vocabulary.ids.items():
        if kinds[i] != Kind.NORMAL or (ranks and len(text) == 1):  # special tokens, every byte
            tokens.add(text)
    return metadata, tokens, ranks.asked


def write(name: str, data: dict[str, Any]) -> None:
    """The data with a case a line."""
    cases = ",\n".join(json.dumps(case, ensure_ascii=False) for case in data["cases"])
    metadata = json.dumps(data["metadata"], ensure_ascii=False)
    (HERE / name).write_text(f'{{"metadata": {metadata},\n"cases": [\n{cases}\n]}}\n', "utf-8")


def short(cases: list[dict], count: int) -> list[dict]:
    """`count` cases spread over all those of at most 60 characters."""
    fitting = [case for case in cases if len(case["text"]) <= 60]
    return fitting[:: max(1, len(fitting) // count)][:count]


def main(golden: Path, smollm2: Path) -> None:
    """Both files."""
    cases = json.loads((golden / "tokenizer/smollm2-135m-q4_1.json").read_text("utf-8"))
    cases = short(cases, BPE_TEXTS)
    metadata, tokens, merges = record(smollm2, [case["text"] for case in cases])
    data = cut(metadata, tokens, cases)
    order = metadata["tokenizer.ggml.merges"]
    data["metadata"]["tokenizer.ggml.merges"] = [merge for merge in order if merge in merges]
    write("tiny_bpe.json", data)

    path = golden / "vocab/ggml-vocab-llama-spm.gguf"
    inputs, outputs = (Path(f"{path}.{end}").read_bytes().decode() for end in ("inp", "out"))
    texts = inputs.split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in outputs.split("\n")]
    pairs = zip(texts[:-1], ids[:-1], strict=True)
    cases = short([{"text": text, "plain": plain} for text, plain in pairs], SPM_TEXTS)
    metadata, tokens, _ = record(path, [case["text"] for case in cases])
    write("tiny_spm.json", cut(metadata, tokens, cases))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
