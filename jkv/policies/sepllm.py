"""SepLLM: punctuation stands for the segments that it ends."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jkv.cache import Prompt, Slots, Token
from jkv.policies.base import Evict, require
from jkv.policies.registry import register

# Below every text position, and still a whole number in float32 after a position is added.
BEFORE_ALL = -(2.0**24)


@register("sepllm")
@dataclass(frozen=True, kw_only=True)
class SepLLM(Evict):
    """Keeps the first tokens, the last ones and the separators between them; what separators leave free, recent text.

    Exact: with `interval=1`, every decoded token sees what SepLLM's mask in the G-KV code shows it, for `window` and
    `sink` of the same size and `budget` = sink + window + that code's `sep_cache_len` - 1. As there, the recent text
    leaves the last place to a separator.
    Differs: compacts every `interval` tokens; keys keep their text positions, and text leaves the cache one token
    after the other, where the paper renumbers them inside the cache and drops a whole past window at once.

    Attributes:
        budget: tokens kept per kv head, everything included; or a share of the tokens seen.
        sink: first tokens of the text always kept.
        separators: characters whose tokens are kept; a newline is written as backslash n.
        separator_ids: their token ids, which `prepare` finds.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.12094"
    needs_queries: ClassVar[bool] = False

    sink: int = 4
    window: int = 256
    separators: str = r".,?!;:\n"
    separator_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError when a field is out of range."""
        super().__post_init__()
        require(self, bool(self.separators), "separators", "at least one character")

    def prepare(self, token_ids: Callable[[str], tuple[int, ...]]) -> "SepLLM":
        """Finds the tokens that are one separator, alone, after a space or inside a word, unless ids are given.

        Raises:
            ValueError: no separator is a token of its own.
        """
        if self.separator_ids:
            return self
        characters = sorted(set(self.separators.replace(r"\n", "\n")))
        alone = (token_ids(lead + character) for character in characters for lead in ("", " "))
        word = token_ids("a")
        inside = (ids for ids in (token_ids("a" + character) for character in characters) if ids[:-1] == word)
        found = {ids[0] for ids in alone if len(ids) == 1} | {ids[-1] for ids in inside}
        require(self, bool(found), "separators", "characters that the tokenizer has tokens for")
        return replace(self, separator_ids=tuple(sorted(found)))

    def due(self, slots: Slots) -> Array:
        """Which rows and heads may have to drop a token, a full budget included: its last place is a separator's."""
        return slots.length >= self.target(slots.seen)[:, None]

    def begin(self, slots: Slots, prompt: Prompt) -> Slots:
        """Marks the separators of the prompt."""
        mark = self._is_separator(prompt.tokens)[:, None]
        return replace(slots, extra={"separator": jnp.broadcast_to(mark, slots.pos.shape) & slots.filled})

    def append(self, store: Slots, token: Token) -> Slots:
        """Appends the token and whether it is a separator."""
        store = super().append(store, token)
        newest = store.recent(1) & token.active.reshape(-1, 1, 1)
        mark = jnp.where(newest, self._is_separator(token.token).reshape(-1, 1, 1), store.extra["separator"])
        return replace(store, extra={"separator": mark})

    def score(self, slots: Slots, queries: Array) -> Array:
        """Separators before other text, and the later the better."""
        del queries
        past = slots.filled & ~slots.recent(self.window) & (slots.pos >= self.sink)
        separator = past & slots.extra["separator"]
        other = past & ~separator
        newer = jnp.cumsum(other[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]
        places = self.target(slots.seen).reshape(-1, 1, 1) - self.sink - self.window
        fits = newer + jnp.sum(separator, axis=-1, keepdims=True, dtype=jnp.int32) < places
        position = slots.pos.astype(jnp.float32)
        return jnp.where(separator, position, jnp.where(other & fits, position + BEFORE_ALL, -jnp.inf))

    def _is_separator(self, tokens: Array) -> Array:
        if not self.separator_ids:
            raise ValueError(
                "policy SepLLM: separator_ids is empty; call prepare with the tokenizer's encoding, or give the ids"
            )
        return jnp.isin(tokens, jnp.array(self.separator_ids, jnp.int32))
