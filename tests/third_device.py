"""A third device, as small as one can be: dictionaries of arrays, and lists for graphs."""

import numpy as np

from llamagraph.gguf.quants import QUANTS
from llamagraph.program.target import target_named

TYPES = {"F32": np.float32, "I32": np.int32, "U32": np.uint32}


class ListDevice:
    """Memory, queue and graphs in one object; addresses are (arena, start, dtype, shape)."""

    name, ahead = "list", False

    def __init__(self):
        self.target = target_named("numpy")
        self.memory = self.queue = self.graphs = self
        self.bytes, self.weights, self.tape = {}, {}, None

    def reserve(self, arena, n_bytes):
        self.bytes[arena] = np.zeros(min(n_bytes, 1 << 28), np.uint8)

    def grow(self, *arguments): ...
    wait = close = load = grow
    def account(self): return {}
    def available(self): return 1 << 30
    def weight_bytes(self, weight): return weight.n_bytes
    def size(self, graph): return 0
    def upload(self, weight, raw, repack):
        self.weights[weight.start] = QUANTS[weight.dtype].dequantise(raw, weight.shape)

    def address(self, b): return (b.arena, b.start, b.dtype, b.shape)
    def array(self, address):
        arena, start, dtype, shape = address
        if arena == "weights":
            return self.weights[start]
        return np.ndarray(shape, TYPES[dtype], self.bytes[arena].data, start)

    def write(self, buffer, values, first=0):
        self.array(self.address(buffer))[first : first + len(values)] = values

    def host_view(self, buffer): return self.array(self.address(buffer))
    def read(self, buffer): return self.host_view(buffer).copy()
    def bind(self, call): return call
    def launch(self, call):
        if self.tape is not None:
            self.tape.append(call)
            return len(self.tape) - 1
        values = (self.array(a) if isinstance(a, tuple) else a for a in call.args)
        call.kernel.reference(*values, **dict(call.kernel.constants))

    def capture(self, record, old=None):
        self.tape = tape = []
        nodes = record()
        self.tape = None
        return tape, nodes

    def update(self, graph, node, call): graph[node] = call
    def replay(self, graph): [self.launch(call) for call in graph]
