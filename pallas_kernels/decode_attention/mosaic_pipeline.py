"""Keys and values on their way to shared memory, some steps ahead of the computation, on Mosaic GPU."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # of which the oldest jax that the package supports, the one pyright sees, has less


class Pipeline(NamedTuple):
    """The copies of one program: by TMA, where each has a barrier, or by cp.async, which are waited for by number.

    Attributes:
        sources: keys and values `[B, H, C, D]` in global memory.
        tiles: room for them in shared memory, `[stages, slots, D]`.
        landed: barriers, two a stage; None for cp.async.
        head: index of the row and of its kv head.
        first, stop: steps of the program; a step takes `slots` slots.
    """

    sources: tuple[Any, Any]
    tiles: tuple[Any, Any]
    landed: Any
    head: tuple[Array, Array]
    first: Array
    stop: Array

    def slot(self, step: Array) -> Array:
        """First slot of a step's tile: that of the last one starts early where the capacity is no multiple of it."""
        slots, capacity = self.tiles[0].shape[1], self.sources[0].shape[2]
        return jnp.minimum(step * slots, capacity - slots)

    def start(self) -> None:
        """Begins the copies of the first steps."""

        @pl.when(self.first < self.stop)
        def _() -> None:
            for i in range(self._stages - 1):
                self._fetch(self.first + i)

    def advance(self, step: Array) -> None:
        """Begins the copies that take the place of those of the step before."""
        if self.landed is not None:
            plgpu.commit_smem()  # puts the step's reads before what TMA writes
        self._fetch(step + self._stages - 1)

    def take(self, step: Array, which: int) -> Any:
        """A step's tile of keys, 0, or of values, 1, once it is there."""
        stage = self._stage(step)
        if self.landed is None:
            plgpu.wait_gmem_to_smem(2 * self._stages - 1 - which)
        else:
            plgpu.barrier_wait(self.landed.at[2 * stage + which])
        return self.tiles[which].at[stage]

    def finish(self) -> None:
        """Waits for the copies that no step takes."""
        if self.landed is None:
            plgpu.wait_gmem_to_smem(0)

    @property
    def _stages(self) -> int:
        return self.tiles[0].shape[0]

    def _stage(self, step: Array) -> Array:
        return lax.rem(step - self.first, self._stages)

    def _fetch(self, step: Array) -> None:
        stage = self._stage(step)
        if self.landed is None:
            # Always one, for the count: after the last step its tile again.
            self._copy(jnp.minimum(step, self.stop - 1), stage)
        else:
            pl.when(step < self.stop)(lambda: self._copy(step, stage))

    def _copy(self, step: Array, stage: Array) -> None:
        slots = pl.ds(self.slot(step), self.tiles[0].shape[1])
        for i, (source, tile) in enumerate(zip(self.sources, self.tiles, strict=True)):
            source, tile = source.at[*self.head, slots], tile.at[stage]
            if self.landed is None:
                plgpu.copy_gmem_to_smem(source, tile, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
            else:
                plgpu.copy_gmem_to_smem(source, tile, self.landed.at[2 * stage + i])
