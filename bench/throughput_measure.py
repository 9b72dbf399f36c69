"""Runs a batch of texts on the device at hand, and says how fast it was and how far from its floor."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.gpu_target import TARGETS
from bench.predict import Prediction, Work, predict
from jkv.engine import Request
from jkv.loop import Programs, Row, Scheduler
from jkv.sampling import seed_words

SHORTEST_ID = 16  # below are a vocabulary's special tokens, as a rule


def random_prompts(work: Work, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(SHORTEST_ID, work.engine.config.vocab_size, (count, work.prompt)).tolist()


def run_texts(
    work: Work,
    weights: nnx.State,
    prompts: Sequence[Sequence[int]],
    *,
    eos: Sequence[int] = (),
    programs: Programs | None = None,
) -> dict[str, float]:
    """Answers prompts in as many slots as the batch has rows.

    Args:
        work: how; its `new` is the longest answer.
        weights: parameters of the model.
        prompts: token ids.
        eos: ids that end an answer; none lets every answer have all its tokens.
        programs: compiled before.

    Returns:
        `new_tokens`, `decoded_tokens` (without the first of each text), and seconds of `prefill`, `decode` and
        `compile`.
    """
    engine, programs = work.engine, programs or Programs()
    compiled = programs.seconds
    scheduler = Scheduler(
        engine=engine,
        weights=weights,
        programs=programs,
        request=Request(
            jnp.asarray(seed_words(0)),
            jnp.asarray([*eos, *[-1] * (8 - len(eos))], jnp.int32),
            engine.policy.bring(engine.config, engine.spec.dtype),
        ),
        rows=[Row(index, prompt, work.new) for index, prompt in enumerate(prompts)],
        slots=work.batch,
    )
    new = sum(len(drawn.tokens) for drawn in scheduler.run())
    return {
        "new_tokens": new,
        "decoded_tokens": new - len(prompts),
        "prefill_seconds": scheduler.prefill_seconds,
        "decode_seconds": scheduler.decode_seconds,
        "compile_seconds": programs.seconds - compiled,
    }


def describe_run(ran: dict[str, float], work: Work, whole: Work) -> dict[str, Any]:
    """Rates and floors of what `run_texts` gives.

    Args:
        ran: its figures.
        work: what ran.
        whole: the same with its answers at their full length.

    Returns:
        `tokens_per_second`, prompts included, and `decode_tokens_per_second`; `floor_bytes` that a step must move, and
        the `share_of_floor` that was reached, where the device's bandwidth is known; `whole_tokens_per_second`, what
        the rate would be with whole answers if a step took as much longer as it has more to move, where they were cut
        short; `best`, this where there is one and else the first; bytes of keys and values, at whole answers.
    """
    done, full = predict(work), predict(whole)
    seconds = ran["prefill_seconds"] + ran["decode_seconds"]
    step = ran["decode_seconds"] * work.batch / ran["decoded_tokens"] if ran["decoded_tokens"] else None
    bandwidth = find_bandwidth()
    whole_step = step and step * _moved(full) / _moved(done)
    texts = ran["new_tokens"] - ran["decoded_tokens"]
    whole_seconds = whole_step and ran["prefill_seconds"] + whole_step * (whole.new - 1) * texts / work.batch
    rate = ran["new_tokens"] / seconds
    whole_rate = texts * whole.new / whole_seconds if whole_seconds and whole.new > work.new else None
    return {
        **ran,
        "tokens_per_second": rate,
        "decode_tokens_per_second": step and work.batch / step,
        "floor_bytes": _moved(done),
        "share_of_floor": _moved(done) / bandwidth / step if step and bandwidth else None,
        "whole_tokens_per_second": whole_rate,
        "best": whole_rate or rate,
        "kv_bytes_held": full.kv_held,
        "kv_bytes_read": full.kv_read,
    }


def find_bandwidth() -> float | None:
    """Bytes a second of the device's memory by its data sheet; None of a device that is not known."""
    kind = jax.devices()[0].device_kind.lower()
    return next((target.bandwidth for name, target in TARGETS.items() if name in kind), None)


def _moved(prediction: Prediction) -> float:
    return prediction.step + prediction.compacted
