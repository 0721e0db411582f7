"""The bytes of all tokens as one tree, so that what tokens share is looked at once.

Built at once in numpy, level by level: a vocabulary of 128 000 tokens has some 350 000 nodes. Does
not know grammars; matcher.py walks it.
"""

from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np


class TokenTrie:
    """Nodes are numbered level by level from the root, 0; the children of one lie side by side.

    `text_of` gives what a reader sees of a token, `real` (n_vocab,) says which are tokens at all,
    `ends` are those that end a text. A token whose bytes hold a NUL never fits, as in llama.cpp.
    """

    def __init__(self, text_of: Callable[[int], bytes], real: np.ndarray, ends: Collection[int]):
        self.text_of, self.real, self.ends = text_of, real, frozenset(ends)
        self.n_vocab = len(real)

    @cached_property
    def _levels(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Level by level 256 * parent + byte of each node, sorted; and each token's last node.

        Tokens that show nothing keep the root.
        """
        texts = [b"" if id in self.ends or b"\0" in text else text
                 for id, text in enumerate(map(self.text_of, range(self.n_vocab)))]
        data = np.frombuffer(b"".join(texts), np.uint8).astype(np.int64)
        lengths = np.array([len(text) for text in texts], np.int64)
        starts = np.cumsum(lengths) - lengths
        last, levels, n_nodes = np.zeros(self.n_vocab, np.int64), [], 1
        for depth in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > depth)
            keys, which = np.unique(256 * last[longer] + data[starts[longer] + depth],
                                    return_inverse=True)
            last[longer] = n_nodes + which
            levels.append(keys)
            n_nodes += len(keys)
        return levels, last.astype(np.int32)

    @cached_property
    def _nodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys = np.concatenate([np.zeros(1, np.int64), *self._levels[0]])
        n_children = np.bincount(keys[1:] >> 8, minlength=len(keys)).astype(np.int32)
        first_child = np.cumsum(n_children, dtype=np.int32) - n_children + 1
        return (keys & 255).astype(np.uint8), first_child, n_children

    @property
    def last_node(self) -> np.ndarray:
        """int32 (n_vocab,): the node at which a token ends; 0 for those that show nothing."""
        return self._levels[1]

    @property
    def byte(self) -> np.ndarray:
        """uint8 (n_nodes,): the byte that leads to the node."""
        return self._nodes[0]

    def children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of some nodes all children, and for each of these the index of its parent in `nodes`."""
        _, first_child, n_children = self._nodes
        counts = n_children[nodes]
        parents = np.repeat(np.arange(len(nodes)), counts)
        before = np.cumsum(counts) - counts
        return np.arange(len(parents)) - (before - first_child[nodes])[parents], parents
