"""Policies that keep the whole text and read some of it: what they read, and that nothing is lost."""

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import config as hf_config
from checkpoints import save_draft
from jkv.config import CacheSpec
from jkv.models import rope
from jkv.models.decoder import Decoder
from jkv.models.retrieval_head import RetrievalHead, extend
from jkv.policies import Evict, Policy, describe, entry, names
from jkv.policies.gkv import GKV
from jkv.policies.h2o import H2O
from jkv.policies.quest import PagedReading, Quest
from jkv.policies.shadowkv import ShadowKV
from jkv.policies.specontext import SpeContext
from jkv.prompt import read_prompt
from models import KINDS, Trace, batch, dense, make_engine, request, run, tiny, visible
from reads import Reads, tell_reads
from weights.eagle import load_head

SELECTORS = [name for name in names() if name != "full" and not isinstance(entry(name).policy, Evict)]
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
# Presets that differ from others by a number; the matrix over all policies has them too.
COSTLY = ("quest@eval", "shadowkv@efficient", "specontext@paper", "specontext@previous")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in COSTLY else ()) for name in SELECTORS]
# About the sizes of chunks and pages, and long.
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 109)


@functools.cache
def model_of(kind: str) -> Decoder:
    return tiny(kind)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(length + 1000 * seed).integers(2, 64, length).tolist()


def sized(name: str, **sizes: int) -> Policy:
    """A policy with the sizes that it has fields for; what is off stays off."""
    policy = entry(name).policy
    values = dict(describe(policy))
    return replace(policy, **{key: min(size, values[key]) for key, size in sizes.items() if key in values})


@functools.cache
def full_logits(kind: str) -> np.ndarray:
    return run(model_of(kind), entry("full").policy, [text(n) for n in LENGTHS], 6, longest=128).logits


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for i, name in enumerate(SELECTORS) for kind in (KINDS if "@" not in name else KINDS[i % 4 :][:1])],
)
def test_reading_everything_equals_full_attention(kind, name):
    trace = run(
        model_of(kind), sized(name, budget=128, interval=4, rank=32), [text(n) for n in LENGTHS], 6, longest=128
    )
    assert np.max(np.abs(trace.logits - full_logits(kind))) <= (1e-4 if name.startswith("shadowkv") else 1e-5)


SMALL = {"budget": 24, "page": 8, "dense": 0, "chunk": 4, "outliers": 1, "local": 1, "rank": 32, "recent": 3, "sink": 2}


@functools.cache
def told(name: str) -> tuple[Trace, Reads]:
    """A run on prompts of 120 and 75 tokens that reads little of them."""
    policy, reads = tell_reads(sized(name, interval=8, **SMALL))
    trace = run(model_of("llama"), policy, [text(120), text(75)], 12, longest=128)
    jax.effects_barrier()
    return trace, reads


@pytest.mark.parametrize("name", SELECTORS)
def test_what_is_read_is_as_little_as_the_policy_says(name):
    policy, (_, reads) = sized(name, interval=8, **SMALL), told(name)
    chosen = set()
    for (_, step), sets in reads.sets.items():
        for row, head, of in np.ndindex(*sets.shape):
            length = (120, 75)[row] + step + 1
            spec = CacheSpec(num_kv_heads=2, group=2, head_dim=16, max_len=256, max_new=step + 1, max_prompt=128)
            most = policy.tokens_read(spec, length)
            read = sets[row, head, of]
            assert read <= {*range(length)}
            assert len(read) <= sum(most.values()) < length
            if name != "quest@eval":
                assert length - 1 in read, "the token that is being decoded"
            if isinstance(policy, SpeContext):
                certain = {*range(policy.sink), *range(length - policy.recent, length)}
                assert certain <= read and len(read) == policy.budget
                assert np.array_equal(sets, reads.sets[0, step]), "layers read different tokens"
            chosen.add(tuple(sorted(read - {length - 1})))
    assert len(chosen) > 12, "hardly anything is chosen"


@pytest.mark.parametrize("name", EACH)
def test_of_a_thousand_tokens_none_is_lost(name):
    prompts, new = [text(40), text(9)], 1001
    policy = sized(name, interval=64, **SMALL)
    engine, weights = make_engine(model_of("llama"), policy, longest=64, new=new)
    state, _ = engine.prefill(weights, *batch(prompts, 64, new), request())
    for step in range(16, new, 16):
        state, out = engine.decode(weights, state, request(), steps=16)
        if policy.interval and step % policy.interval == 0:
            state = engine.compact(state)
    assert np.all(np.asarray(out.tokens) >= 0)
    for store in state.stores:
        held = np.asarray(policy.positions(store))
        for row, head in np.ndindex(2, 2):
            tokens = np.sort(held[row, head][held[row, head] >= 0])
            np.testing.assert_array_equal(tokens, np.arange(len(prompts[row]) + 992))
        assert np.asarray(store.length).tolist() == [[len(prompt) + 992] * 2 for prompt in prompts]
        if policy.interval:
            # What is read at every step does not grow: outliers, local chunks, and less than an interval more.
            assert store.exact.capacity <= 4 + 7 + policy.interval


def test_sizes_that_do_not_fit_are_refused_by_field():
    for policy, field, values in (
        (Quest, "budget", {"budget": 47}),
        (Quest, "page", {"page": 12}),
        (SpeContext, "budget", {"budget": 68}),
        (SpeContext, "recent", {"recent": 0}),
        (ShadowKV, "budget", {"budget": 100}),
        (ShadowKV, "chunk", {"chunk": 3}),
        (ShadowKV, "local", {"local": 0}),
    ):
        with pytest.raises(ValueError, match=f"policy {policy.__name__}: {field} is"):
            policy(**values)
    with pytest.raises(ValueError, match=r"policy SpeContext: head is 'elsewhere'; .* adapt"):
        SpeContext(head="elsewhere").at(0, 2)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Drafts of a tiny Llama of 4 layers: one that shares its embedding, and one with an embedding of its own."""
    model = tiny(num_layers=4)
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    values = hf_config(vocab_size=64, hidden_size=64, **sizes)
    folder = tmp_path_factory.mktemp("drafts")
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    paths = {
        layout: str(save_draft(folder / layout, values, layout=layout, **ids)) for layout in ("official", "speculators")
    }
    return {"model": model, **paths}


def features_of(model: Decoder, tokens: list[int], head: RetrievalHead) -> jax.Array:
    """The features of every token of a text that is read at once, `[1, T, E]`."""
    c = model.config
    x, entered = model.embed(jnp.asarray([tokens])), []
    cos, sin = rope.cos_sin(c.rope, c.head_dim, jnp.arange(len(tokens), dtype=jnp.int32)[None])
    for layer in model.layers:
        entered.append(x)
        x, _ = read_prompt(layer, x, cos, sin, jnp.asarray([tokens]), jnp.array([len(tokens)]), block=512)
    return head.fuse(jnp.concatenate([entered[layer] for layer in head.config.feature_layers], axis=-1))


@pytest.mark.parametrize("layout", ["official", "speculators"])
@pytest.mark.parametrize("features", ["previous", "none"])
def test_a_draft_chooses_as_it_attends_to_the_whole_text(drafts, layout, features):
    model, lengths, new = drafts["model"], (60, 33), 9
    policy = SpeContext(budget=150, sink=1, recent=1, head=drafts[layout], features=features).adapt(model.config)
    brought = policy.bring(model.config, "float32")
    # A budget above the text would read all of it and choose nothing, so what is decoded is that of full attention,
    # and the choice of a small budget is made beside it.
    full = run(model, entry("full").policy, [text(n) for n in lengths], new, longest=64)
    small, reads = tell_reads(replace(policy, budget=12))
    engine, weights = make_engine(model, small, longest=64, new=new)
    asked = request()._replace(brought=brought)
    state, out = engine.prefill(weights, *batch([text(n) for n in lengths], 64, new), asked)
    assert np.array_equal(out.tokens[:, 0], full.tokens[:, 0])
    state, _ = engine.decode(weights, state, asked, steps=1)
    jax.effects_barrier()

    head = load_head(policy._open(model.config), dtype="float32")
    rotation, size = extend(head.config, engine.spec.max_len), head.config.head_dim
    for row, length in enumerate(lengths):
        tokens = text(length) + full.tokens[row, :1].tolist()
        ids = jnp.asarray([tokens])
        before = None
        if features == "previous":
            before = jnp.pad(features_of(model, tokens, head)[:, :-1], ((0, 0), (1, 0), (0, 0)))
        position = jnp.arange(len(tokens), dtype=jnp.int32)[None]
        q, k = head.heads(head.embed(ids, model.embed(ids)), before, *rope.cos_sin(rotation, size, position))
        logits = np.einsum("hgd,thd->hgt", q[0, -1], k[0]) * size**-0.5
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs = (probs / probs.sum(-1, keepdims=True)).max(axis=1)
        for kv_head in range(2):
            others = 1 + np.argsort(-probs[kv_head, 1:-1], kind="stable")[:10]
            assert reads.sets[1, 0][row, kv_head, 0] == {0, *others.tolist(), length}


def test_a_draft_follows_the_text_while_it_is_decoded(drafts):
    # A text that is decoded leaves the head with the keys that reading it at once gives it.
    model, length, new = drafts["model"], 33, 9
    policy = SpeContext(budget=128, head=drafts["official"]).adapt(model.config)
    asked = request()._replace(brought=policy.bring(model.config, "float32"))
    engine, weights = make_engine(model, policy, longest=64, new=new)
    state, out = engine.prefill(weights, *batch([text(length), []], 64, new), asked)
    decoded = [int(out.tokens[0, 0])]
    for _ in range(new - 1):
        state, out = engine.decode(weights, state, asked, steps=1)
        decoded.append(int(out.tokens[0, 0]))
    whole, _ = engine.prefill(weights, *batch([text(length) + decoded[:-1], []], 64, new), asked)
    total = length + new - 1
    for name, found, expected in (
        ("keys", state.shared.keys[0, :, :total], whole.shared.keys[0, :, :total]),
        ("feature", state.shared.feature[0], whole.shared.feature[0]),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=name)
    assert np.abs(whole.shared.keys[0, :, total:]).max() > 0, "padding's keys are never read"


def test_drafts_of_another_model_are_refused(drafts):
    with pytest.raises(ValueError, match=r"config\.json"):
        SpeContext(head=drafts["official"]).adapt(tiny("qwen2-3", num_layers=4).config)


def test_a_selection_over_what_an_evicting_policy_keeps():
    program = next(text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "QuestOverGKV" in text)
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(program, "README.md", "exec", dont_inherit=True), space)
    sizes = {"budget": 24, "window": 4, "interval": 6, "page": 4}
    both = space["QuestOverGKV"](read=12, **sizes)
    policy, reads = tell_reads(both)
    lengths, new = (60, 33), 20
    trace = run(model_of("llama"), policy, [text(n) for n in lengths], new, longest=64)
    jax.effects_barrier()
    assert {len(held) for sets in reads.sets.values() for held in sets.ravel()} <= {*range(9, 13)}
    for row, length in enumerate(lengths):
        tokens = text(length) + trace.tokens[row, :-1].tolist()
        seen = reads.mask(2, row, length, len(tokens))
        assert not np.any(seen & ~visible(trace, row, length, len(tokens))[:, :, None]), "what was evicted was read"
        expected, _ = dense(model_of("llama"), tokens, seen)
        assert np.max(np.abs(trace.logits[row] - expected[length - 1 :])) < 1e-4
    # Reading everything that is kept is the evicting policy.
    whole = replace(both, read=40)
    for name in ("logits", "tokens"):
        found, expected = (
            getattr(run(model_of("llama"), one, [text(n) for n in lengths], new, longest=64), name)
            for one in (whole, GKV(budget=24, window=4, interval=6))
        )
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_pages_of_a_policy_that_sums_attention_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class QuestOverH2O(PagedReading, H2O):
        """Needs what is not read."""

    with pytest.raises(ValueError, match="policy QuestOverH2O: a sum of attention needs all slots"):
        QuestOverH2O()
