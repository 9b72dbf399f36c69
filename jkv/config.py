"""Model and cache configuration: frozen, validated, read from a Hugging Face ``config.json``.

Axis letters used everywhere: B row, T prompt token, C slot, H kv head, G query head within a kv head's group,
D head dim, E model dim, F mlp dim, V vocabulary, L layer, W window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pallas_kernels.dispatch import XLA, Implementation

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")
ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, as Hugging Face's ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4).

    Attributes:
        type: one of `ROPE_TYPES`.
        theta: base of the geometric frequencies.
        factor: context extension (linear, llama3, yarn).
        original_max_position: tokens of the context before extension (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band, in turns over the original context.
        beta_fast, beta_slow: yarn's band, in turns over the original context.
        attention_factor: yarn's scale of cos and sin; None derives it from `factor` (and `mscale`, `mscale_all_dim`).
        truncate: yarn rounds its band to whole dimensions.
    """

    type: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Reads either spelling of a Hugging Face config.

        Raises:
            ValueError: a rope type outside `ROPE_TYPES`, or one of its required keys is missing.
        """
        scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"config.json: rope_type {kind!r} is not supported; supported types are {', '.join(ROPE_TYPES)}"
            )
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0, 1):
            raise ValueError(f"config.json: partial_rotary_factor {partial} is not supported; only 1.0 is")
        scaled = kind != "default"
        known: dict[str, Any] = {
            key: _number(scaling, key, float, above=0.0 if key == "factor" else None)
            for key in (*(("factor",) if scaled else ()), *ROPE_NUMBERS)
            if key == "factor" or scaling.get(key) is not None
        }
        if scaling.get("truncate") is not None:
            known["truncate"] = bool(scaling["truncate"])
        original = next(
            (s for s in (scaling, config) if s.get("original_max_position_embeddings")),
            {"original_max_position_embeddings": config.get("max_position_embeddings")},
        )
        if kind in ("llama3", "yarn"):
            known["original_max_position"] = _number(original, "original_max_position_embeddings", int, above=0)
        theta = scaling if scaling.get("rope_theta") is not None else config
        return cls(type=kind, theta=_number(theta, "rope_theta", float, 10000.0, above=0), **known)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama, Qwen2 or Qwen3 decoder.

    Attributes:
        vocab_size: rows of the embedding (padding rows included).
        num_heads, num_kv_heads: query heads and key/value heads; the former a multiple of the latter.
        qkv_bias, out_bias, mlp_bias: which projections carry a bias.
        qk_norm: RMSNorm over each head's query and key, before RoPE (Qwen3).
        max_position: longest text in tokens that the model was trained for.
        eos_ids: token ids that end a text.
        dtype: dtype of the checkpoint's weights as its config states it, or None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError when the sizes do not fit together."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"config.json: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: {self.num_heads} query heads cannot be shared among {self.num_kv_heads} kv heads; "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"config.json: head_dim {self.head_dim} must be an even number for rotary embedding")

    @property
    def group(self) -> int:
        """Query heads that share one kv head (G)."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token adds over all layers, at `itemsize` bytes a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a Hugging Face ``config.json`` as written by transformers 4 or 5.

        Raises:
            ValueError: the architecture, or a feature that it has switched on, is not supported; the message names
                the key and its value.
        """
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"config.json: model_type {kind!r} is not supported; supported types are {', '.join(MODEL_TYPES)}"
            )
        _refuse_unsupported(config)
        heads, hidden = (_number(config, key, int, above=0) for key in ("num_attention_heads", "hidden_size"))
        bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=kind,
            vocab_size=_number(config, "vocab_size", int, above=0),
            hidden_size=hidden,
            intermediate_size=_number(config, "intermediate_size", int, above=0),
            num_layers=_number(config, "num_hidden_layers", int, above=0),
            num_heads=heads,
            num_kv_heads=_number(config, "num_key_value_heads", int, heads, above=0),
            head_dim=_number(config, "head_dim", int, hidden // heads, above=0),
            norm_eps=_number(config, "rms_norm_eps", float, 1e-6, above=0),
            rope=RopeConfig.from_hf(config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if kind == "qwen2" else bias,
            out_bias=False if kind == "qwen2" else bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
            qk_norm=kind == "qwen3",
            max_position=_number(config, "max_position_embeddings", int, 2048, above=0),
            bos_id=config.get("bos_token_id"),
            eos_ids=_token_ids(config, "eos_token_id"),
            dtype=_dtype_name(config.get("dtype") or config.get("torch_dtype")),
        )


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a policy needs to know to size one layer's cache; static.

    Attributes:
        num_kv_heads, group, head_dim: H, G and D.
        rope: of the cached keys.
        max_len: longest text, prompt and new tokens together, that the run may reach.
        max_new: most new tokens of a row.
        max_prompt: longest prompt of the run, padding included.
        dtype: dtype name of cached keys and values.
        implementation: what runs the operations on it.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    max_len: int
    max_new: int
    max_prompt: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    dtype: str = "float32"
    implementation: Implementation = XLA

    @property
    def vector_bytes(self) -> int:
        """Bytes of one head's key or value of a token."""
        return self.head_dim * (4 if self.dtype == "float32" else 2)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        max_len: int,
        max_new: int,
        max_prompt: int,
        dtype: str,
        implementation: Implementation = XLA,
    ) -> "CacheSpec":
        """The cache of one layer of a model."""
        return cls(
            num_kv_heads=config.num_kv_heads,
            group=config.group,
            head_dim=config.head_dim,
            max_len=max_len,
            max_new=max_new,
            max_prompt=max_prompt,
            rope=config.rope,
            dtype=dtype,
            implementation=implementation,
        )


def _number(
    config: Mapping[str, Any], key: str, kind: type, default: float | None = None, *, above: float | None = None
) -> Any:
    """A number of a config; a key that is missing or null stands for `default`."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: the key {key!r} is missing; is this a whole checkpoint?")
    whole = isinstance(value, int) or (isinstance(value, float) and (kind is float or value.is_integer()))
    if isinstance(value, bool) or not whole or (above is not None and not value > above):
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(
            f"config.json: {key} is {value!r}; it must be {wanted}" + ("" if above is None else f" above {above:g}")
        )
    return kind(value)


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One token id, a list of them, or none."""
    value = config.get(key)
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"config.json: {key} is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


def _dtype_name(value: Any) -> str | None:
    name = str(value).removeprefix("torch.") if value is not None else None
    return name if name in DTYPES else None


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    layers = _number(config, "num_hidden_layers", int, above=0)
    window = config.get("sliding_window")
    if config.get("use_sliding_window") and window and int(config.get("max_window_layers") or 0) < layers:
        raise ValueError(
            f"config.json: use_sliding_window is on (sliding_window {window}); sliding-window attention is not "
            "supported, only checkpoints with use_sliding_window false"
        )
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("config.json: layer_types has 'sliding_attention', which is not supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"config.json: quantization_config (quant_method {method!r}) is not supported for safetensors; "
            "use the unquantised checkpoint, or a GGUF file"
        )
    if config.get("num_experts") or config.get("num_local_experts"):
        raise ValueError("config.json: mixture-of-experts models (num_experts) are not supported")
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {act!r} is not supported; only 'silu' is")
