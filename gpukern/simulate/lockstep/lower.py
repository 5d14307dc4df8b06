"""Each basic block becomes, once, a Python function that runs it for all threads of a group with NumPy.

    def block_3(g):                               # matmul.py:36
        r = g.r
        acc, k = r["acc"], r["k"]
        a = g.load(a_tile, (ty.astype(int64), k), "matmul.py:37")
        r["acc"] = acc + a
        return 2

The source is kept (`Code.source`), for whoever wants to see what a warp executes.
"""

import keyword
import re
from collections import Counter

import numpy as np

from gpukern.simulate.lockstep.arithmetic import NAMESPACE
from gpukern.simulate.lockstep.blocks import BlockLowering
from gpukern.simulate.lockstep.frontend import Typed
from gpukern.simulate.lockstep.program import flatten, live_registers, touched
from gpukern.simulate.lockstep.views import VIEWS

_NAMESPACE = NAMESPACE | {function.__name__: function for function in VIEWS}


class Code:
    """A kernel lowered for one signature.

    blocks          the functions, by program counter
    live            for each, the registers that have to be carried into it
    source          of them all
    shared_static   bytes of the static shared arrays; dynamic ones begin after them
    shared_granule  bytes of the smallest element in shared memory
    flops           for each block, {line: floating-point operations of a thread}: + - * / count one, fma two
    files           {"file.py": where it lies}
    grid_sync       does the whole grid meet, so that all blocks must be in flight?
    stored, loaded  names of the kernel's arguments through which it may write, and may read
    """

    def __init__(self, kernel: Typed):
        blocks = flatten(kernel)
        self.name = kernel.ir.func_id.func_name
        self.arguments, self.argument_types = list(kernel.ir.arg_names), kernel.signature.args
        self.shared_static, self.shared_granule = 0, 8
        self.view_granule = 16  # bytes of the smallest type as which an array is viewed
        self.grid_sync = any(b.end[0] == "barrier" and b.end[2] == "grid" for b in blocks)
        self.fences = False  # does it call threadfence?
        self.asks_atomics = False  # does it look at what an atomic returns, to wait for others?
        self.meets = set()  # blocks in which warps meet: shuffles, votes, syncwarp
        self.local_arrays, self.shared_arrays = 0, {}
        self.flops = [Counter() for _ in blocks]
        self.constants, self._registers, self._taken = {}, {}, {"g", "r", "pair", "several"} | set(_NAMESPACE)
        lowered = [BlockLowering(self, pc, block) for pc, block in enumerate(blocks)]
        self.live = live_registers(blocks, [b.uses for b in lowered], [b.defines for b in lowered])
        self.files = {b.scope.line(b.loc).rpartition(":")[0]: b.loc.filename for b in blocks if b.scope.at is None}
        self.line_of_block = [b.scope.line(b.loc) for b in blocks]
        self.source = "\n\n".join(b.source(set().union(*(self.live[s] for s in b.block.successors))) for b in lowered)
        namespace = _NAMESPACE | self.constants
        exec(compile(self.source, f"<{self.name} in lockstep>", "exec"), namespace)
        self.blocks = [namespace[f"block_{pc}"] for pc in range(len(blocks))]
        self.stored, self.loaded = touched(blocks)
        self.dynamic = -(-self.shared_static // 16) * 16

    def granule(self, of_arrays: int) -> int:
        """Bytes of the smallest thing by which memory is accessed whose arrays hold things of `of_arrays` bytes."""
        return min(of_arrays, self.view_granule)

    def constant(self, value) -> str:
        """A name for a value in the generated source."""
        for name, known in self.constants.items():
            if known is value or (np.ndim(value) == 0 and type(known) is type(value) and repr(known) == repr(value)):
                return name
        if isinstance(value, np.dtype):
            name = self.name_for("record")
        else:
            kind = value.dtype.name if isinstance(value, np.generic) else type(value).__name__
            name = self.name_for(f"{kind}_{value}" if np.ndim(value) == 0 else kind)
        self.constants[name] = value
        return name

    def name_for(self, wanted: str) -> str:
        """A Python name like `wanted` that the generated source does not use yet."""
        name = re.sub(r"\W", "_", wanted)
        if not name[0].isalpha():
            name = "t" + name
        while name in self._taken or keyword.iskeyword(name):
            name += "_"
        self._taken.add(name)
        return name

    def register(self, qualified: str) -> str:
        """The name in generated source of a variable of the flat program."""
        if qualified not in self._registers:
            self._registers[qualified] = self.name_for(qualified.replace("$", ""))
        return self._registers[qualified]
