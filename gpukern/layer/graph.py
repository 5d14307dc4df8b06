"""One step of a layer, captured once and replayed: the launches of a plan become one launch of a CUDA graph.

A graph remembers kernels with their arguments: the same memory, the same sizes, the same row of the cache. So it has
its own x, cache and z, and holds one step; another number of tokens is another graph.
"""

import torch

from gpukern import device
from gpukern.layer.config import Step
from gpukern.layer.plan import Plan
from gpukern.op import InputError, require


class LayerGraph:
    """`layer.graph(step, plan)`: called as `layer.run(x, cache)`, with the same result. Without a card it runs plainly.

    x, cache, z  the memory that the captured kernels read and write. `replay()` runs on what lies there: what is timed
    """

    def __init__(self, layer, step: Step, plan: Plan):
        self.step = step
        self._layer, self._plan = layer, plan
        self.x, self.cache = layer.inputs(step)
        self.z = self._run()  # compiles what is not compiled yet; and what a capture must not do for the first time
        self._graph = None
        if device.simulated():
            return
        stream = torch.cuda.Stream()  # the capture is on a stream of its own: let its libraries set themselves up there
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.z = self._run()

    def _run(self) -> torch.Tensor:
        self.cache.length = self.step.S - self.step.T
        return self._layer.run(self.x, self.cache, self._plan)

    def replay(self) -> torch.Tensor:
        """Run the step on `self.x` and `self.cache` as they are; returns `self.z`, which the next replay overwrites."""
        if self._graph is None:
            self.z = self._run()
        else:
            self._graph.replay()
        return self.z

    def __call__(self, x: torch.Tensor, cache) -> torch.Tensor:
        """x: `[B, T, C]`, a cache of S - T tokens with room for T more. Appends them; returns z, in memory of its own.

        Tokens of the cache are copied in and new ones back, unless it is `self.cache`.
        Raises InputError for another step than the one captured.
        """
        step, first = self.step, self.step.S - self.step.T
        require(x, "x", tuple(self.x.shape), like=self.x)
        room = cache.k.shape[2]
        if cache is not self.cache and (cache.length != first or room < step.S or cache.k.shape[0] != step.B):
            raise InputError(
                f"this graph holds a step of {step.T} tokens onto {first} in {step.B} sequences; the cache has "
                f"{cache.length} in {cache.k.shape[0]}, and room for {room}. Make a graph for that step."
            )
        self.x.copy_(x)
        for mine, theirs in ((self.cache.k, cache.k), (self.cache.v, cache.v)):
            if mine is not theirs:
                mine[:, :, :first] = theirs[:, :, :first]
        z = self.replay().clone()
        for mine, theirs in ((self.cache.k, cache.k), (self.cache.v, cache.v)):
            if mine is not theirs:
                theirs[:, :, first : step.S] = mine[:, :, first : step.S]
        cache.length = step.S
        return z
