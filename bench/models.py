"""The models of the papers' tables: their sizes."""

from jkv.config import ModelConfig, RopeConfig

MODELS = {
    # deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
    "qwen-7b": ModelConfig(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        qkv_bias=True,
        max_position=131072,
    ),
    # deepseek-ai/DeepSeek-R1-Distill-Llama-8B
    "llama-8b": ModelConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeConfig(type="llama3", theta=500000.0, factor=8.0, original_max_position=8192),
        max_position=131072,
    ),
    # Qwen/Qwen3-8B
    "qwen3-8b": ModelConfig(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(theta=1000000.0),
        qk_norm=True,
        max_position=40960,
    ),
}
