"""Model and cache configuration: frozen, validated, read from a Hugging Face ``config.json``.

Axis letters used everywhere: B row, T prompt token, C slot, H kv head, G query head within a kv head's group,
D head dim, E model dim, F mlp dim, V vocabulary, L layer, W window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


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
        if kind != "default" and "factor" not in scaling:
            raise ValueError(f"config.json: rope_type {kind!r} needs the key 'factor' in its rope parameters")
        known: dict[str, Any] = {
            key: scaling[key]
            for key in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "truncate",
            )
            if scaling.get(key) is not None
        }
        original = (
            scaling.get("original_max_position_embeddings")
            or config.get("original_max_position_embeddings")
            or config.get("max_position_embeddings")
        )
        if kind in ("llama3", "yarn") and not original:
            raise ValueError(f"config.json: rope_type {kind!r} needs 'original_max_position_embeddings'")
        theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
        return cls(type=kind, theta=float(theta), original_max_position=int(original or 0), **known)


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
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            vocab, mlp, layers = (config[k] for k in ("vocab_size", "intermediate_size", "num_hidden_layers"))
        except KeyError as missing:
            raise ValueError(f"config.json: the key {missing} is missing; is this a whole checkpoint?") from None
        bias = bool(config.get("attention_bias", False))
        eos = config.get("eos_token_id")
        return cls(
            model_type=kind,
            vocab_size=int(vocab),
            hidden_size=hidden,
            intermediate_size=int(mlp),
            num_layers=int(layers),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if kind == "qwen2" else bias,
            out_bias=False if kind == "qwen2" else bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
            qk_norm=kind == "qwen3",
            max_position=int(config.get("max_position_embeddings") or 2048),
            bos_id=config.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (int(eos),)),
            dtype=_dtype_name(config.get("dtype") or config.get("torch_dtype")),
        )


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a policy needs to know to size one layer's cache; static.

    Attributes:
        num_kv_heads, group, head_dim: H, G and D.
        max_len: longest text, prompt and new tokens together, that the run may reach.
        max_new: most new tokens of a row.
        dtype: dtype name of cached keys and values.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    max_len: int
    max_new: int
    dtype: str = "float32"

    @classmethod
    def of(cls, config: ModelConfig, *, max_len: int, max_new: int, dtype: str) -> "CacheSpec":
        """The cache of one layer of a model."""
        return cls(
            num_kv_heads=config.num_kv_heads,
            group=config.group,
            head_dim=config.head_dim,
            max_len=max_len,
            max_new=max_new,
            dtype=dtype,
        )


def _dtype_name(value: Any) -> str | None:
    name = str(value).removeprefix("torch.") if value is not None else None
    return name if name in DTYPES else None


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    layers = int(config.get("num_hidden_layers", 0))
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
