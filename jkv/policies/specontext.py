"""SpeContext: what all layers read is chosen before the first one runs."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array

import pallas_kernels
from jkv.cache import Prompt, Slots, Token, View
from jkv.config import CacheSpec, ModelConfig
from jkv.policies.base import Policy, Step, require
from jkv.policies.fields import INTERNAL
from jkv.policies.registry import preset, register
from jkv.retrieval import Draft, FirstLayer, Previous, Retriever
from pallas_kernels import Pages

OWN_HEADS: dict[str, Retriever] = {"first-layer": FirstLayer(), "previous": Previous()}


@register("specontext")
@dataclass(frozen=True, kw_only=True)
class SpeContext(Policy):
    """Keeps every token and reads those that a retrieval head attends to most, the same ones in every layer.

    The query heads of a kv head share a choice, by the largest probability among them. The token being decoded is
    always read. Nothing depends on what the layers compute in the step, so that a choice can be made ahead of them.

    Exact: queries, keys and attention of an EAGLE-3 draft, and the largest of each group's probabilities; the paper's
    own code is not public.
    Differs: the paper always takes its head from a draft, and does not say what the draft's features are while tokens
    are chosen: here they are those of the token before, or none. Sinks and recent tokens are read for certain;
    `specontext@paper` does without.

    Attributes:
        budget: tokens read per kv head, everything included.
        head: "first-layer": queries and keys of the model's own first layer; "previous": the last token's query of the
            layer in the middle, with that layer's keys; or an EAGLE-3 draft of the model, as a folder or hub id.
        features: what a draft is told beside the tokens: "previous": what the model's layers made of the token before;
            "none": nothing, with half the weights.
        sink: first tokens of the text always read.
        recent: last tokens always read, the one being decoded included.
        retriever: the head, which `adapt` and `at` set.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2512.00722"

    budget: int = 2048
    head: str = "first-layer"
    features: Literal["previous", "none"] = "previous"
    sink: int = 4
    recent: int = 64
    retriever: Retriever | None = field(default=None, metadata=INTERNAL)

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        require(self, bool(self.head), "head", f"{', '.join(OWN_HEADS)}, or an EAGLE-3 draft as a folder or hub id")
        require(self, self.sink >= 0, "sink", "0 or more tokens")
        require(self, self.recent >= 1, "recent", "at least the token being decoded")
        always = self.sink + self.recent
        require(self, self.budget > always, "budget", f"more than sink + recent = {always} tokens")

    def adapt(self, config: ModelConfig) -> "SpeContext":
        """Finds the draft, and checks that it is one of this model."""
        if self.head in OWN_HEADS:
            return self
        return replace(self, retriever=Draft(head=self._open(config).config))

    def bring(self, config: ModelConfig, dtype: str) -> Any:
        """The weights of the draft's head."""
        if self.head in OWN_HEADS:
            return ()
        from weights.eagle import load_head  # a model is loaded without any of this

        return nnx.split(load_head(self._open(config), dtype=dtype))[1]

    def _open(self, config: ModelConfig) -> Any:
        from weights.eagle import open_head

        return open_head(self.head, config, uses_features=self.features == "previous")

    @property
    def _retriever(self) -> Retriever:
        found = self.retriever or OWN_HEADS.get(self.head)
        require(self, found is not None, "head", "read first; call adapt with the model's config")
        assert found is not None
        return found

    def at(self, layer: int, layers: int) -> Policy:
        """The head as the layer meets it."""
        there = self._retriever.at(layer, layers)
        return self if there == self._retriever else replace(self, retriever=there)

    def tokens_read(self, spec: CacheSpec, length: int) -> dict[str, int]:
        """Sinks, recent tokens and what the head chooses."""
        del spec
        sink = min(self.sink, length)
        recent = min(self.recent, length - sink)
        return {"sinks": sink, "recent": recent, "selected": min(self.budget, length) - sink - recent}

    def bytes_read(self, spec: CacheSpec, length: int) -> int:
        """The tokens, and what the head reads."""
        return super().bytes_read(spec, length) + self._retriever.bytes_read(spec, length)

    def shared(self, spec: CacheSpec, batch: int) -> Any:
        """What the head remembers."""
        return self._retriever.shared(spec, batch)

    def read_prompt(self, shared: Any, x: Array, prompt: Prompt, brought: Any) -> Any:
        """The head may read along."""
        return self._retriever.read_prompt(shared, x, prompt, brought)

    def notice(self, shared: Any, x: Array, token: Token, brought: Any) -> Any:
        """The head may take notice."""
        return self._retriever.notice(shared, x, token, brought)

    def plan(self, shared: Any, step: Step) -> tuple[Pages, Any]:
        """Chooses the tokens."""
        probs, shared = self._retriever.attend(shared, step)
        return self.choose_tokens(probs, step.stores[0], step.active), shared

    def choose_tokens(self, probs: Array, store: Slots, active: Array) -> Pages:
        """The tokens to read.

        Args:
            probs: probabilities of the slots for each query head, float32 `[B, H, G, C]`.
            store: before the token being decoded is in it.
            active: rows that are still decoding, bool `[B]`.
        """
        length = store.length + active[:, None]
        start = jnp.where(length <= self.budget, 0, length - self.recent)
        slot = jnp.arange(store.capacity, dtype=jnp.int32).reshape(1, 1, -1)
        score = jnp.where(slot < self.sink, jnp.inf, jnp.max(probs, axis=2))
        score = jnp.where(slot < start[..., None], score, -jnp.inf)
        most = min(self.budget - self.recent, store.capacity)
        index = pallas_kernels.select_top(
            score, jnp.minimum(most, start), most=most, implementation=store.implementation
        )
        return Pages(index[:, :, None], start[:, :, None], 1)

    def select(self, store: Slots, q: Array, plan: Pages) -> View:
        """The tokens that were chosen before the layers."""
        return replace(super().select(store, q, plan), pages=plan)


preset(
    "specontext@previous",
    SpeContext(head="previous"),
    "the last token's query chooses, with the keys of the middle layer",
)
preset("specontext@paper", SpeContext(sink=0, recent=1), "nothing but the token being decoded is read for certain")
