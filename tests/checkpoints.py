"""Makes tiny Hugging Face checkpoints for tests: random weights, a byte-level BPE tokenizer, a chat template; drafts.

No torch and no download. Norms and biases are off their defaults, so a loader that skips one gives other logits, and
the weights are scaled so that greedy text of the random model does not repeat one token.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = SPECIAL = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
THINK = ("<think>", "</think>")
VOCAB_SIZE = 308
TEXT = "the quick brown fox jumps over the lazy dog, then sleeps. 12 + 30 = 42"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ '<|user|>' + message.content }}"
    "{% else %}{{ '<|assistant|>' + message.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% endif %}{% endif %}"
)
_NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A Hugging Face config of a tiny `model_type` (llama, qwen2, qwen3), 64 wide, with `changes` on top."""
    base: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type] + "ForCausalLM"],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if model_type == "qwen3" else 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    return {**base, **changes}


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint's tensors, in the order of the layers."""
    kind, hidden, mlp = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    attention_bias = kind != "qwen2" and config.get("attention_bias", False)
    mlp_bias = kind == "llama" and config.get("mlp_bias", False)
    projections = (
        ("self_attn.q_proj", queries, hidden, kind == "qwen2" or attention_bias),
        ("self_attn.k_proj", keys, hidden, kind == "qwen2" or attention_bias),
        ("self_attn.v_proj", keys, hidden, kind == "qwen2" or attention_bias),
        ("self_attn.o_proj", hidden, queries, attention_bias),
        ("mlp.gate_proj", mlp, hidden, mlp_bias),
        ("mlp.up_proj", mlp, hidden, mlp_bias),
        ("mlp.down_proj", hidden, mlp, mlp_bias),
    )
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows, columns, bias in projections:
            yield f"{prefix}.{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}.{name}.bias", (rows,)
        if kind == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (size,)
            yield f"{prefix}.self_attn.k_norm.weight", (size,)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], hidden)


def random_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face names."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape, np.float32)
        if "norm" in name:
            return 1 + np.float32(0.3) * noise
        if name.endswith("bias"):
            return np.float32(0.5) * noise
        if "embed_tokens" in name:  # small beside what the layers add: a tied head must not find the last token again
            return np.float32(0.15 if config.get("tie_word_embeddings") else 1.0) * noise
        return np.float32(2.0 * shape[1] ** -0.5) * noise

    return {name: draw(name, shape) for name, shape in tensor_shapes(config)}


def save_hf(
    folder: str | Path, config: Mapping[str, Any], *, seed: int = 0, dtype: str = "float32", shards: int = 1
) -> Path:
    """Writes a checkpoint of random weights with its tokenizer.

    Args:
        folder: made if need be.
        config: as from `config`; written as it is, so its own "dtype" key may differ from `dtype`.
        seed: of the weights.
        dtype: "float32", "float16" or "bfloat16", of the stored tensors.
        shards: more than one writes that many files and an index.

    Returns:
        `folder` as a path.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed=seed)
    save_tensors(folder, {k: v.astype(_NUMPY_DTYPES[dtype]) for k, v in tensors.items()}, shards=shards)
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(folder)
    return folder


def draft_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of an EAGLE-3 draft of the model of `config`, under its official names."""
    rng, hidden, mlp, size = np.random.default_rng(seed), config["hidden_size"], 2 * 64, config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (mlp, hidden),
        "midlayer.mlp.up_proj.weight": (mlp, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, mlp),
        "norm.weight": (hidden,),
        "lm_head.weight": (24, hidden),
    }
    tensors = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape, np.float32)
        tensors[name] = 1 + np.float32(0.3) * noise if "norm" in name else np.float32(2.0 * shape[1] ** -0.5) * noise
    kept = np.sort(rng.permutation(config["vocab_size"])[:24])
    return {**tensors, "d2t": kept - np.arange(24), "t2d": np.isin(np.arange(config["vocab_size"]), kept)}


def save_draft(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    layout: Literal["official", "speculators"] = "official",
    **changes: Any,
) -> Path:
    """Writes an EAGLE-3 draft of a model.

    Args:
        folder: made if need be.
        config: of the model, as from `config`.
        tensors: under their official names; None is random ones. Those of the speculators layout get an embedding,
            which is random too, unless it is among them.
        layout: of names and of config.json.
        changes: keys of config.json, on top.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = draft_tensors(config) if tensors is None else tensors
    sizes = {**config, "num_hidden_layers": 1, "max_position_embeddings": 128}
    values = {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 24, **changes}
    if layout == "speculators":
        rng = np.random.default_rng(1)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        own = rng.standard_normal((config["vocab_size"], config["hidden_size"]), np.float32)
        tensors = {"embed_tokens.weight": own, **tensors}
        values = {"speculators_model_type": "eagle3", "draft_vocab_size": 24, "transformer_layer_config": sizes}
        values |= {"architectures": ["Eagle3Speculator"], "norm_before_residual": True, **changes}
    save_tensors(folder, tensors)
    _write_json(folder / "config.json", values)
    return folder


def save_tensors(folder: Path, tensors: Mapping[str, np.ndarray], *, shards: int = 1) -> None:
    """Writes `tensors` as one safetensors file, or as several and their index."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: every byte, four control tokens, two thinking marks, a few merges, one BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*SPECIAL, *THINK],
    )
    tokenizer.train_from_iterator([TEXT] * 8, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Writes `make_tokenizer` and its chat template as transformers 5 does; there is no padding token, on purpose."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS},
    )


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
