"""What each program of a run takes in memory at its fullest, and the largest run that fits; nothing is compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.config import ModelConfig
from jkv.engine import Engine, Request, State
from jkv.loop import bucket, reads_together
from jkv.models.decoder import Decoder
from jkv.policies import Policy
from jkv.workspace import workspace

STEP = 64  # tokens, to which a length or budget that fits is found
GUESSES = 6  # after which a search halves what is left


@dataclass(frozen=True)
class Peak:
    """Bytes in memory while a program is at its fullest.

    Attributes:
        held: arguments and results, each buffer once, and all that waits beside them.
        workspace: what the program needs for itself.
    """

    held: int
    workspace: int

    @property
    def total(self) -> int:
        """Both."""
        return self.held + self.workspace


def measure_programs(
    engine: Engine, *, batch: int, prompt: int, platform: str, refills: bool = False
) -> dict[str, Peak]:
    """The peak of each of a run's programs, by name.

    Args:
        engine: what runs.
        batch: rows.
        prompt: tokens that the prompts are padded to.
        platform: what the programs are compiled for, as jax calls it: "cpu", or "cuda" or "gpu".
        refills: whether slots are given to further rows.
    """
    trace = _Tracer(engine, platform)
    together = reads_together(batch, prompt)
    state, peak = trace.prefill(batch, prompt if together else bucket(0))
    found = {"prefill": peak}
    if refills or not together:
        fresh, peak = trace.prefill(1, prompt)
        found["refill"] = replace(peak, held=peak.held + nbytes(state))
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        needed, _ = trace.measure(Engine.admit, engine, state, fresh, slot)
        found["admit"] = Peak(trace.always + nbytes((state, fresh)), needed)
    needed, _ = trace.measure(Engine.decode, engine, trace.weights, state, trace.request, steps=engine.steps)
    found["decode"] = Peak(trace.always + nbytes(state), needed)
    if engine.policy.interval:
        found["compact"] = Peak(trace.always + nbytes(state), trace.compact(state))
    return found


@dataclass
class _Tracer:
    """Traces what the engine calls, and each call of a kind once."""

    engine: Engine
    platform: str
    _known: dict[Any, tuple[int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, dtype = self.engine.config, self.engine.spec.dtype
        self.weights = abstract_weights(config, dtype)
        brought = jax.eval_shape(lambda: self.engine.policy.bring(config, dtype))
        self.request = Request(jnp.zeros(2, jnp.uint32), jnp.zeros(8, jnp.int32), brought)
        self.always = nbytes((self.weights, brought))

    def measure(self, function: Any, static: Any, *args: Any, **options: Any) -> tuple[int, Any]:
        """The workspace of a jitted function whose first argument is static, and its results as shapes."""
        args = jax.tree.map(shape_of, args)
        leaves, structure = jax.tree.flatten(args)
        key = (function, static, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._known:
            traced = function.trace(static, *args, **options)
            donated = [argument.donated for argument in jax.tree.leaves(traced.args_info)]
            self._known[key] = workspace(traced.jaxpr, donated, platform=self.platform), traced.out_info
        return self._known[key]

    def prefill(self, batch: int, prompt: int) -> tuple[State, Peak]:
        """The state after the prompts, as shapes, and the peak on the way there."""
        peaks: list[Peak] = []
        held = self.always

        def call(function: Any, static: Engine, *args: Any) -> Any:
            nonlocal held
            needed, results = self.measure(function, static, *args)
            x, store, state, _ = results
            held += nbytes(store)
            peaks.append(Peak(held + nbytes((x, state)), needed))
            return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), results)

        def begin(weights: Any) -> State:
            length, rows = np.full(batch, prompt, np.int32), np.zeros(batch, np.uint32)
            tokens = np.zeros((batch, prompt), np.int32)
            return self.engine.prefill(weights, tokens, length, length, rows, self.request, call=call)[0]

        state = jax.eval_shape(begin, self.weights)
        return state, max(peaks, key=lambda peak: peak.total)

    def compact(self, state: State) -> int:
        """The workspace of the store that needs most."""
        found = []

        def call(function: Any, static: Any, *args: Any) -> Any:
            found.append(self.measure(function, static, *args)[0])
            return args[0]

        self.engine.compact(state, call=call)
        return max(found)


def largest_batch(
    engine: Engine, *, prompt: int, memory: int, platform: str, refills: bool = False, most: int = 1 << 20
) -> int:
    """The most rows up to `most` whose run fits `memory` bytes; 0 when a single one does not.

    Other arguments are those of `measure_programs`.
    """

    def total(batch: int) -> int:
        return total_memory(measure_programs(engine, batch=batch, prompt=prompt, platform=platform, refills=refills))

    least = nbytes(abstract_weights(engine.config, engine.spec.dtype))
    return find_largest(total, memory, least=least, most=most)


def longest_answer(
    make_engine: Callable[[int], Engine], *, batch: int, prompt: int, memory: int, platform: str, most: int
) -> int:
    """The longest answer up to `most`, in multiples of `STEP` tokens, whose run fits; 0 where none does.

    Args:
        make_engine: what runs for answers of so many tokens.
        batch, prompt, memory, platform: as in `largest_batch`.
        most: tokens.
    """

    def total(steps: int) -> int:
        engine = make_engine(steps * STEP)
        return total_memory(measure_programs(engine, batch=batch, prompt=prompt, platform=platform))

    return STEP * find_largest(total, memory, most=most // STEP)


def largest_budget(engine: Engine, *, batch: int, prompt: int, memory: int, platform: str) -> int:
    """The largest budget in multiples of `STEP` tokens whose run fits; 0 where none does or the policy has none."""
    budgets = [STEP * steps for steps in range(1, engine.spec.max_len // STEP + 1)]
    policies = [policy for budget in budgets if (policy := with_budget(engine.policy, budget)) is not None]

    def total(number: int) -> int:
        changed = replace(engine, policy=policies[number - 1])
        return total_memory(measure_programs(changed, batch=batch, prompt=prompt, platform=platform))

    found = find_largest(total, memory, most=len(policies))
    return policies[found - 1].budget if found else 0  # pyright: ignore[reportAttributeAccessIssue]


def with_budget(policy: Policy, budget: int) -> Policy | None:
    """The policy with another budget; None where it has none, or needs a larger one."""
    if not isinstance(getattr(policy, "budget", None), int):
        return None
    try:
        return replace(policy, budget=budget)  # pyright: ignore[reportCallIssue]
    except ValueError:
        return None


def total_memory(peaks: Mapping[str, Peak]) -> int:
    """Bytes of the program that takes most."""
    return max(peak.total for peak in peaks.values())


def find_largest(total: Callable[[int], int], memory: int, *, least: int = 0, most: int = 1 << 20) -> int:
    """The largest number up to `most` whose `total` is within `memory`, 0 if there is none.

    Bytes grow in proportion to rows or tokens but for steps, so the search goes where a line leads.
    """
    low, high, at_low = 0, most + 1, least
    guess, guesses = 1, 0
    while low + 1 < high:
        guess = min(max(guess, low + 1), high - 1)
        found, guesses = total(guess), guesses + 1
        slope = (found - at_low) / (guess - low)
        if found <= memory:
            low, at_low = guess, found
        else:
            high = guess
        if slope <= 0:
            guess = high - 1
        else:
            guess = (low + high) // 2 if guesses > GUESSES else low + int((memory - at_low) / slope)
    return low


def abstract_weights(config: ModelConfig, dtype: str) -> nnx.State:
    """The parameters of a model as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(shape_of, nnx.state(Decoder(config, dtype=dtype)))


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """An array's shape."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
