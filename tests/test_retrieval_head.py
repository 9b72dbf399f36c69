"""The retrieval head of an EAGLE-3 draft against a recording of its authors' code, whatever the draft's layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from checkpoints import config, save_draft
from jkv.config import ModelConfig, RopeConfig
from jkv.models import rope
from jkv.models.retrieval_head import HeadConfig, RetrievalHead, extend, join
from oracle_cases import FOLDER, read
from weights import parameter_arrays
from weights.eagle import load_head, open_head

TOLERANCE = {"rtol": 0, "atol": 1e-4}
NAMES = {
    "w_fc": "fc.weight",
    "w_input_layernorm": "midlayer.input_layernorm.weight",
    "w_hidden_norm": "midlayer.hidden_norm.weight",
    "w_q": "midlayer.self_attn.q_proj.weight",
    "w_k": "midlayer.self_attn.k_proj.weight",
}


@pytest.fixture(scope="module")
def recording() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return read(FOLDER / "retrieval" / "eagle3_head_gqa2.npz")


def load(folder: Any, recording: tuple, *, layout: Any = "official", uses_features: bool = True) -> RetrievalHead:
    """A head that went through a checkpoint of the recorded weights."""
    settings, arrays = recording
    values = config(
        vocab_size=len(arrays["w_embed"]),
        hidden_size=settings["hidden"],
        num_hidden_layers=6,
        num_attention_heads=settings["Hq"],
        num_key_value_heads=settings["Hkv"],
        head_dim=settings["D"],
        rms_norm_eps=settings["rms_norm_eps"],
    )
    tensors = {stored: arrays[name] for name, stored in NAMES.items()}
    if layout == "speculators":
        tensors["embed_tokens.weight"] = arrays["w_embed"]
    save_draft(folder, values, tensors, layout=layout)
    return load_head(open_head(folder, ModelConfig.from_hf(values), uses_features=uses_features))


def run(head: RetrievalHead, arrays: dict[str, np.ndarray], *, with_features: bool) -> tuple[Array, Array]:
    """Queries and keys of the recorded text, through `join` as a compiled program has them."""
    embedded, tokens = jnp.asarray(arrays["w_embed"][arrays["in_ids"]]), jnp.asarray(arrays["in_ids"])

    @jax.jit
    def heads(weights: nnx.State) -> tuple[Array, Array]:
        inside = join(head.config, weights)
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        features = inside.fuse(jnp.asarray(arrays["in_feats3h"])) if with_features else None
        rotation = rope.cos_sin(extend(head.config, tokens.shape[1]), head.config.head_dim, place)
        own = head.config.vocab_size > 0  # then what the target embeds must not matter
        return inside.heads(inside.embed(tokens, embedded * (0 if own else 1)), features, *rotation)

    return heads(nnx.split(head)[1])


def attention(q: Array, k: Array, row: int) -> np.ndarray:
    """Probabilities of one token's queries, `[B, H, G, T]`."""
    logits = jnp.einsum("bhgd,bthd->bhgt", q[:, row], k) * q.shape[-1] ** -0.5
    seen = (jnp.arange(k.shape[1]) <= row).reshape(1, 1, 1, -1)
    return np.asarray(jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)))


def top(probs: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-probs, axis=-1, kind="stable")[..., :count], axis=-1)


@pytest.mark.parametrize("layout", ["official", "speculators"])
def test_both_halves(tmp_path, recording, layout):
    settings, arrays = recording
    head = load(tmp_path, recording, layout=layout)
    assert head.config.feature_layers == (2, 3, 3) and bool(head.config.vocab_size) == (layout == "speculators")
    q, k = run(head, arrays, with_features=True)
    np.testing.assert_allclose(jnp.moveaxis(k, 1, 2), arrays["out_k_roped"], **TOLERANCE)
    length = k.shape[1]
    for name, row in (("out_attn_last", length - 1), ("out_attn_row_mid", length // 2)):
        found = attention(q, k, row).reshape(arrays[name].shape)
        np.testing.assert_allclose(found, arrays[name], **TOLERANCE)
    largest = np.max(attention(q, k, length - 1), axis=2)
    np.testing.assert_allclose(largest, arrays["spec_group_max"], **TOLERANCE)
    np.testing.assert_array_equal(top(largest, settings["topk"]), arrays["spec_topk_sorted"])


@pytest.mark.parametrize("uses_features", [True, False])
@pytest.mark.parametrize("layout", ["official", "speculators"])
def test_embedding_half_alone(tmp_path, recording, layout, uses_features):
    settings, arrays = recording
    head = load(tmp_path, recording, layout=layout, uses_features=uses_features)
    q, k = run(head, arrays, with_features=False)
    np.testing.assert_allclose(jnp.moveaxis(k, 1, 2), arrays["embonly_k_roped"], **TOLERANCE)
    probs = attention(q, k, k.shape[1] - 1)
    expected = arrays["embonly_attn_last"]
    np.testing.assert_allclose(probs.reshape(expected.shape), expected, **TOLERANCE)
    np.testing.assert_array_equal(top(np.max(probs, axis=2), settings["topk"]), arrays["spec_embonly_topk_sorted"])


def test_features_of_zero_are_none(tmp_path, recording):
    head = load(tmp_path, recording)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, head.config.hidden_size), np.float32))
    rotation = rope.cos_sin(head.config.rope, head.config.head_dim, jnp.asarray([5, 0, 70], jnp.int32))
    for found, expected in zip(head.heads(x, x * 0, *rotation), head.heads(x, None, *rotation), strict=True):
        np.testing.assert_allclose(found, expected, **TOLERANCE)


def test_a_head_without_features_holds_half(tmp_path, recording):
    whole, half = (
        parameter_arrays(load(tmp_path / str(uses), recording, uses_features=uses)) for uses in (True, False)
    )
    hidden = recording[0]["hidden"]
    assert half.keys() == {"embedding_norm.scale", "qk.kernel"} and half["qk.kernel"].shape == (96, hidden)
    np.testing.assert_array_equal(half["qk.kernel"], whole["qk.kernel"][:, :hidden])
    assert whole.keys() - half.keys() == {"feature_norm.scale", "fc.kernel"}


def test_a_head_without_features_takes_none(tmp_path, recording):
    head = load(tmp_path, recording, uses_features=False)
    x = jnp.zeros((1, head.config.hidden_size))
    with pytest.raises(ValueError, match="without features"):
        head.heads(x, x, *rope.cos_sin(head.config.rope, head.config.head_dim, jnp.zeros(1, jnp.int32)))
    with pytest.raises(ValueError, match="without features"):
        head.fuse(jnp.zeros((1, 3 * head.config.hidden_size)))


SIZES: dict[str, Any] = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def test_a_config_is_static():
    head = HeadConfig(**SIZES, feature_layers=(2, 3, 4))
    assert hash(head) == hash(HeadConfig(**SIZES, feature_layers=(2, 3, 4)))
    assert (head.group, head.fused, head.uses_features, HeadConfig(**SIZES).uses_features) == (2, 3, True, False)


@pytest.mark.parametrize(("max_len", "factor"), [(2049, 2), (4096, 2), (4097, 3), (34816, 17)])
def test_a_long_text_is_reached_by_yarn(max_len, factor):
    head = HeadConfig(**SIZES, rope=RopeConfig(theta=5e5))
    assert extend(head, 2048) == head.rope
    longer = extend(head, max_len)
    assert (longer.type, longer.factor, longer.theta) == ("yarn", factor, 5e5)
    # Quick dimensions turn as before, the slowest is slowed down by the factor, and logits grow by the scale squared.
    freq, scale = rope.inv_freq(longer, head.head_dim)
    plain, _ = rope.inv_freq(head.rope, head.head_dim)
    np.testing.assert_allclose([freq[0], freq[-1]], [plain[0], plain[-1] / factor], rtol=1e-6)
    assert scale == pytest.approx(0.1 * np.log(factor) + 1)


def test_a_scaled_rotation_is_not_scaled_again():
    scaled = RopeConfig(type="llama3", factor=8.0, original_max_position=8192)
    head = HeadConfig(**SIZES, rope=scaled, max_position=65536)
    assert extend(head, 65536) == scaled
    with pytest.raises(ValueError, match=r"reaches 65536 tokens by rope_type 'llama3'.*allow fewer tokens"):
        extend(head, 65537)
