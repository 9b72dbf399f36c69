"""Tokens in, tokens out: prefill, the decode step, and the compiled block of steps. Knows no text.

Every array of a running batch is in one `State`; everything that shapes a program is in one frozen `Engine`, the static
argument of the compiled functions. Layers are unrolled and each has its own store: a scan over layers would copy the
cache at every token.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jkv.attention import attend
from jkv.cache import Token
from jkv.config import CacheSpec, ModelConfig
from jkv.models import rope
from jkv.models.decoder import Decoder, join, single_layer
from jkv.policies import Policy
from jkv.policies.base import Step
from jkv.prompt import read_prompt
from jkv.sampling import Sampling, row_keys, sample

LONGEST_BLOCK = 16
Call = Callable[..., Any]  # function, static argument, arguments
Drawn = tuple[Array, Array, Array | None]  # tokens, finite, logits or None
T = TypeVar("T")


def call_directly(function: Callable[..., Any], static: Any, *args: Any, **options: Any) -> Any:
    """Calls a jitted function whose first argument is static."""
    return function(static, *args, **options)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A batch between two steps.

    Attributes:
        stores: one store per layer, as the policy made it.
        shared: the policy's state outside the layers.
        token: last sampled token of each row, not yet in the cache, int32 `[B]`.
        pos: position of `token` in the text, int32 `[B]`.
        step: tokens sampled so far, int32 `[B]`.
        limit: tokens to sample at most, int32 `[B]`.
        row: id that a row's random keys are folded from, uint32 `[B]`.
        done: rows that have ended, bool `[B]`.
        seen: tokens that the repetition penalty knows of, bool `[B, V]`; None without a penalty.
    """

    stores: tuple[Any, ...]
    shared: Any
    token: Array
    pos: Array
    step: Array
    limit: Array
    row: Array
    done: Array
    seen: Array | None


class Output(NamedTuple):
    """What a program reports to the host, for S sampled tokens a row.

    Attributes:
        tokens: int32 `[B, S]`; -1 where a row had already ended.
        finite: whether every logit was a finite number, bool `[B, S]`; true where a row had ended.
        done: rows that have ended, bool `[B]`.
        logits: float32 `[B, S, V]`, or None unless the engine keeps them.
    """

    tokens: Array
    finite: Array
    done: Array
    logits: Array | None


class Request(NamedTuple):
    """The traced arguments of a run beside its weights: changing them compiles nothing.

    Attributes:
        seed: two words, uint32 `[2]`, as `jkv.sampling.seed_words` gives them.
        eos: token ids that end a row, int32 `[N]`; -1 is none.
        brought: what the policy brings, as `Policy.bring` gave it.
    """

    seed: Array
    eos: Array
    brought: Any = ()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Compiled decoding of one model under one policy.

    Attributes:
        config: the model's sizes.
        policy: what the cache holds.
        spec: size of the cache.
        sampling: how a token is drawn.
        prefill_block: prompt tokens handled at once, so that memory does not grow with their square.
        keep_logits: report the logits of every step.
    """

    config: ModelConfig
    policy: Policy
    spec: CacheSpec
    sampling: Sampling
    prefill_block: int = 512
    keep_logits: bool = False

    @property
    def steps(self) -> int:
        """Steps of one compiled block: the largest divisor of the interval up to `LONGEST_BLOCK`."""
        interval = self.policy.interval or LONGEST_BLOCK
        return max(n for n in range(1, LONGEST_BLOCK + 1) if interval % n == 0)

    def at(self, layer: int) -> "Engine":
        """This engine with the policy of one layer."""
        policy = self.policy.at(layer, self.config.num_layers)
        return self if policy == self.policy else replace(self, policy=policy)

    def prefill(
        self,
        weights: nnx.State,
        tokens: np.ndarray,
        length: np.ndarray,
        limit: np.ndarray,
        row: np.ndarray,
        request: Request,
        *,
        call: Call = call_directly,
    ) -> tuple[State, Output]:
        """Reads the prompts and samples the first token of each.

        One program reads any of the layers, and is called for one after the other: no more than one layer's keys and
        values of whole prompts are there at a time.

        Args:
            weights: parameters of the model.
            tokens: int32 `[B, T]`, right-padded; one program is compiled for each B and T.
            length: tokens of each prompt, int32 `[B]`; 0 for a row that stays idle.
            limit: tokens to sample at most, int32 `[B]`.
            row: id of each row, uint32 `[B]`.
            request: seed and eos ids.
            call: how a jitted function is called.
        """
        config, batch = self.config, tokens.shape[0]
        # Made on the host, so that nothing is compiled for it.
        length = np.asarray(length)
        begin = {
            "token": np.zeros(batch, np.int32),
            "pos": length - 1,
            "step": np.zeros(batch, np.int32),
            "limit": limit,
            "row": row,
            "done": (length == 0) | (np.asarray(limit) == 0),
            "seen": np.zeros((batch, config.vocab_size), bool) if self.sampling.repetition_penalty != 1 else None,
        }
        state = State(stores=(), shared=self.policy.shared(self.spec, batch), **jax.device_put(begin))
        x = jax.device_put(np.zeros((*tokens.shape, config.hidden_size), jax.tree.leaves(weights)[0].dtype))
        stores, out = [], None
        for index in range(config.num_layers):
            part = single_layer(weights, index)
            place = np.array([index == 0, index == config.num_layers - 1])
            engine = self.at(index)
            x, store, state, out = call(Engine.read_layer, engine, part, x, tokens, length, place, state, request)
            stores.append(store)
        assert out is not None
        return replace(state, stores=tuple(stores)), out

    @functools.partial(jax.jit, static_argnums=0, donate_argnames="x")
    def read_layer(
        self,
        weights: nnx.State,
        x: Array,
        tokens: Array,
        length: Array,
        place: Array,
        state: State,
        request: Request,
    ) -> tuple[Array, Any, State, Output]:
        """Reads the prompts with one layer: before the first they are embedded, after the last a token is drawn.

        Args:
            weights: parameters of the model with this layer alone.
            x: residual `[B, T, E]`; its buffer is taken over.
            tokens, length: as in `prefill`.
            place: whether this is the first, and whether it is the last layer, bool `[2]`.
            state: the batch without stores.
            request: seed and eos ids.

        Returns:
            The residual, the layer's store, and, from the last layer, the batch and its first tokens.
        """
        model = join(replace(self.config, num_layers=1), weights, self.spec.implementation)
        x = entered = jnp.where(place[0], model.embed(tokens), x)
        cos, sin = rope.cos_sin(
            model.config.rope, model.config.head_dim, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        )
        x, prompt = read_prompt(
            model.layers[0],
            x,
            cos,
            sin,
            tokens,
            length,
            block=self.prefill_block,
            implementation=self.spec.implementation,
        )
        state = replace(state, shared=self.policy.read_prompt(state.shared, entered, prompt, request.brought))
        last = jnp.take_along_axis(x, jnp.maximum(length - 1, 0).reshape(-1, 1, 1), axis=1)[:, 0]

        def draw(value: tuple[State, Drawn]) -> tuple[State, Drawn]:
            state = value[0]
            if state.seen is not None:
                state = replace(state, seen=mark_tokens(state.seen, tokens, length))
            return self._draw(state, model.logits(last), request)

        nothing = self._draw_nothing(tokens.shape[:1], model.config.vocab_size)
        state, drawn = run_if(place[1], draw, (state, nothing))
        token, finite, logits = jax.tree.map(lambda y: y[:, None], drawn)
        return x, self.policy.ingest(self.spec, prompt), state, Output(token, finite, state.done, logits)

    @functools.partial(jax.jit, static_argnums=0, static_argnames="steps", donate_argnames="state")
    def decode(self, weights: nnx.State, state: State, request: Request, *, steps: int) -> tuple[State, Output]:
        """Decodes a block of steps. A block in which every row has ended before is skipped.

        Args:
            weights: parameters of the model.
            state: the batch; its buffers are taken over.
            request: seed and eos ids.
            steps: tokens to decode; static.
        """
        model = join(self.config, weights, self.spec.implementation)
        nothing = self._draw_nothing((steps, state.token.shape[0]), model.config.vocab_size)

        def step(state: State, _: None) -> tuple[State, Drawn]:
            return self._draw(*self.decode_step(model, state, request.brought), request)

        def block(carry: tuple[State, Drawn]) -> tuple[State, Drawn]:
            return lax.scan(step, carry[0], length=steps)

        state, out = run_if(~jnp.all(state.done), block, (state, nothing))
        tokens, finite, logits = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
        return state, Output(tokens, finite, state.done, logits)

    def compact(self, state: State, rows: np.ndarray | None = None, *, call: Call = call_directly) -> State:
        """Ends an interval: compacts every layer's store, one after the other, by one program for all alike.

        Args:
            state: the batch; its stores are taken over.
            rows: which rows end an interval, bool `[B]`; None is all.
            call: how a jitted function is called.
        """
        rows = np.ones(state.done.shape, bool) if rows is None else rows
        stores = tuple(call(compact_store, self.at(i).policy, store, rows) for i, store in enumerate(state.stores))
        return replace(state, stores=stores)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
    def admit(self, state: State, fresh: State, slot: Array) -> State:
        """Writes a batch of one row, as `prefill` gives it, over the row in a slot; nothing else is touched.

        Args:
            state: the batch; its buffers are taken over.
            fresh: the row.
            slot: its place in the batch, int32 `[]`.
        """
        return jax.tree.map(lambda x, row: lax.dynamic_update_slice_in_dim(x, row, slot, axis=0), state, fresh)

    def decode_step(self, model: Decoder, state: State, brought: Any) -> tuple[State, Array]:
        """Feeds each row's last token through the layers: the new state and the logits `[B, V]`."""
        active, policy = ~state.done, self.policy
        x = model.embed(state.token)
        cos, sin = rope.cos_sin(model.config.rope, model.config.head_dim, state.pos)
        plan, shared = policy.plan(
            state.shared, Step(model, state.stores, state.token, x, cos, sin, state.pos, active, brought)
        )
        stores = []
        for index, (layer, store) in enumerate(zip(model.layers, state.stores, strict=True)):
            policy = self.at(index).policy
            heads = layer.heads(x, cos, sin)
            token = Token(*heads, token=state.token, pos=state.pos, active=active)
            shared = policy.notice(shared, x, token, brought)
            store = policy.append(store, token)
            attended = attend(heads.q, policy.select(store, heads.q, plan), return_probs=policy.needs_probs)
            store = policy.settle(store, attended)
            store, out = policy.observe(store, token, attended.probs), attended.out
            if policy.needs_probs:
                # Or XLA would keep the probabilities of all layers until the end of the step.
                store, out = lax.optimization_barrier((store, out))
            stores.append(store)
            x = layer.finish(x, out)
        return replace(state, stores=tuple(stores), shared=shared), model.logits(x)

    def _draw(self, state: State, logits: Array, request: Request) -> tuple[State, Drawn]:
        """Samples a token for each active row: the new state, and tokens `[B]`, finite `[B]` and the logits."""
        keys = row_keys(request.seed, state.row, state.step)
        token = sample(logits, keys, self.sampling, state.seen)
        active = ~state.done
        step = state.step + active
        ended = jnp.any(token[:, None] == request.eos[None], axis=-1) | (step >= state.limit)
        seen = state.seen
        if seen is not None:
            seen = seen.at[jnp.arange(token.shape[0], dtype=jnp.int32), token].max(active)
        state = replace(
            state,
            token=jnp.where(active, token, state.token),
            pos=state.pos + active,
            step=step,
            done=state.done | ended,
            seen=seen,
        )
        finite = jnp.all(jnp.isfinite(logits), axis=-1) | ~active
        return state, (jnp.where(active, token, -1), finite, logits if self.keep_logits else None)

    def _draw_nothing(self, shape: tuple[int, ...], vocab: int) -> Drawn:
        """What `_draw` reports of rows that have ended."""
        kept = jnp.zeros((*shape, vocab), jnp.float32) if self.keep_logits else None
        return jnp.full(shape, -1, jnp.int32), jnp.ones(shape, bool), kept


def mark_tokens(seen: Array, tokens: Array, length: Array) -> Array:
    """`seen` bool `[B, V]` with each row's first `length` of `tokens` int32 `[B, T]` marked."""
    batch, longest = tokens.shape
    real = jnp.arange(longest, dtype=jnp.int32)[None] < length[:, None]
    return seen.at[jnp.arange(batch, dtype=jnp.int32)[:, None], tokens].max(real)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def compact_store(policy: Policy, store: Any, rows: Array) -> Any:
    """Compacts one layer's store, whose buffers are taken over, in the rows bool `[B]` that end an interval."""
    return policy.compact(store, rows)


def run_if(condition: Array, function: Callable[[T], T], value: T) -> T:
    """``function(value)`` if `condition` else `value`, as a loop of at most one round.

    `lax.cond` around caches makes XLA copy them; a loop updates them in place.
    """
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros((), bool), function(c[1])), (condition, value))[1]
