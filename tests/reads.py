"""What a policy lets attention read in every step: a policy that tells, and the mask of a dense model that sees it."""

import functools
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from jkv.cache import View
from jkv.policies import Policy


@dataclass
class Reads:
    """Text positions that were read, `[B, H, J]` sets of them; J is 1 or G.

    Attributes:
        taken: by layer and the sum of the rows' positions, which grows with every step: what is told of two steps may
            arrive in any order.
    """

    taken: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    @property
    def sets(self) -> dict[tuple[int, int], np.ndarray]:
        """By layer and number of the step."""
        order = sorted({total for _, total in self.taken})
        return {(layer, order.index(total)): found for (layer, total), found in self.taken.items()}

    def mask(self, layers: int, row: int, prompt: int, total: int) -> np.ndarray:
        """Which tokens each query of a row saw, bool `[L, H, J, total, total]`; a prompt's see all before them."""
        told = self.sets
        heads, lists = told[0, 0].shape[1], max(sets.shape[2] for sets in told.values())
        seen = np.tril(np.ones((total, total), bool))[None, None, None]
        seen = seen.repeat(layers, 0).repeat(heads, 1).repeat(lists, 2)
        for layer, head, of, query in np.ndindex(layers, heads, lists, total - prompt):
            sets = told[layer, query]
            allowed = np.zeros(total, bool)
            allowed[sorted(sets[row, head, of % sets.shape[2]])] = True
            seen[layer, head, of, prompt + query] = allowed
        return seen


@functools.cache
def tell_reads(policy: Policy) -> tuple[Policy, Reads]:
    """The same policy, and what runs with it will have let attention read; clear that before a run."""
    reads = Reads()
    return _telling(policy, Listener(reads)), reads


def _telling(policy: Policy, listener: "Listener", layer: int = 0) -> Policy:
    if hasattr(policy, "listener"):
        return replace(policy, layer=layer)  # type: ignore
    values = {spec.name: getattr(policy, spec.name) for spec in fields(policy)}
    return _class(type(policy))(**values, listener=listener, layer=layer)


@dataclass(frozen=True, eq=False)
class Listener:
    """Hashable by identity, as a field of a policy has to be."""

    reads: Reads


@functools.cache
def _class(base: type[Policy]) -> type[Any]:
    def at(self: Any, layer: int, layers: int) -> Policy:
        return _telling(base.at(self, layer, layers), self.listener, layer)

    def select(self: Any, store: Any, q: Array, plan: Any) -> View:
        view = base.select(self, store, q, plan)
        # Without keys and values, which a callback would copy, of both the lists and the sets that they are in.
        small = replace(view, k=view.k[:0], v=view.v[:0])
        if view.beside is not None:
            none = {name: getattr(view.beside, name)[:0] for name in ("a", "b", "cos", "sin")}
            small = replace(small, beside=replace(view.beside, **none))
        jax.debug.callback(functools.partial(_note, self.listener.reads, self.layer), small)
        return view

    more = [("listener", Any, field(default=None)), ("layer", int, field(default=0))]
    name, methods = f"Telling{base.__name__}", {"at": at, "select": select}
    return make_dataclass(name, more, bases=(base,), namespace=methods, frozen=True, kw_only=True)


def _note(reads: Reads, layer: int, view: View) -> None:
    view = jax.tree.map(np.asarray, view)
    assert view.notes is not None
    reads.taken[layer, int(view.notes.place.sum())] = read_positions(view)


def read_positions(view: View) -> np.ndarray:
    """The sets of text positions that a view shows, `[B, H, J]`; its arrays are numpy's."""
    assert view.notes is not None and view.new is not None
    batch, heads, capacity = view.notes.pos.shape
    lists = 1 if view.pages is None else view.pages.index.shape[2]
    found = np.empty((batch, heads, lists), object)
    for row, head, of in np.ndindex(*found.shape):
        length = int(view.length[row, head])
        slots = set(range(length))
        if view.pages is not None:
            start, size = int(view.pages.start[row, head, of]), view.pages.size
            pages = view.pages.index[row, head, of].tolist()
            listed = {slot for page in pages for slot in range(page * size, min((page + 1) * size, capacity))}
            slots = {slot for slot in slots if slot >= start or slot in listed}
        pos = view.notes.pos[row, head].copy()
        if view.new.active[row]:
            pos[length - 1] = view.notes.place[row]
        positions = {int(pos[slot]) for slot in slots}
        if view.beside is not None:
            size, chunks = view.beside.size, view.beside.v.shape[2] // view.beside.size
            for chunk in view.beside.index[row, head].tolist():
                if chunk < chunks:
                    assert not positions & {*range(chunk * size, (chunk + 1) * size)}, "a token would be read twice"
                    positions |= {*range(chunk * size, (chunk + 1) * size)}
        found[row, head, of] = positions
    return found
