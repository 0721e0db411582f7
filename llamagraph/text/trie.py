"""The bytes of all tokens as one tree, so that what tokens share is looked at once.

Built at once in numpy, level by level: a vocabulary of 128 000 tokens has some 350 000 nodes. Does
not know grammars; matcher.py walks it.
"""

from collections.abc import Collection, Sequence

import numpy as np


class TokenTrie:
    """Nodes are numbered level by level from the root, 0; the children of one lie side by side.

    `texts` are what a reader sees of each token, `real` (n_vocab,) says which are tokens at all,
    `ends` are those that end a text. A token whose bytes hold a NUL never fits, as in llama.cpp.

    `byte` uint8 (n_nodes,) leads to a node; `last_node` int32 (n_vocab,) is where a token ends, 0
    for one that shows nothing.
    """

    def __init__(self, texts: Sequence[bytes], real: np.ndarray, ends: Collection[int]):
        self.texts, self.real, self.ends = texts, real, frozenset(ends)
        self.n_vocab = len(texts)
        shown = [b"" if id in self.ends or b"\0" in text else text for id, text in enumerate(texts)]
        levels, self.last_node = _levels(shown)
        keys = np.concatenate([np.zeros(1, np.int64), *levels])
        self.byte = (keys & 255).astype(np.uint8)
        self._n_children = np.bincount(keys[1:] >> 8, minlength=len(keys)).astype(np.int32)
        self._first_child = np.cumsum(self._n_children, dtype=np.int32) - self._n_children + 1

    def children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of some nodes all children, and for each of these the index of its parent in `nodes`."""
        counts = self._n_children[nodes]
        parents = np.repeat(np.arange(len(nodes)), counts)
        before = np.cumsum(counts) - counts
        return np.arange(len(parents)) - (before - self._first_child[nodes])[parents], parents


def _levels(texts: Sequence[bytes]) -> tuple[list[np.ndarray], np.ndarray]:
    """Level by level 256 * parent + byte of each node, sorted; and each text's last node."""
    data = np.frombuffer(b"".join(texts), np.uint8).astype(np.int64)
    lengths = np.array([len(text) for text in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    last, levels, n_nodes = np.zeros(len(texts), np.int64), [], 1
    for depth in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > depth)
        keys, which = np.unique(256 * last[longer] + data[starts[longer] + depth],
                                return_inverse=True)
        last[longer] = n_nodes + which
        levels.append(keys)
        n_nodes += len(keys)
    return levels, last.astype(np.int32)
