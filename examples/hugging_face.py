"""One layer of a few Hugging Face models, with random weights, in bf16 and quantised by torchao.

    pip install transformers torchao
    python -m cute_backend explain examples/hugging_face.py:llama_fp8

Nothing is downloaded: the models are made of their configurations, with their embeddings and last norm.

The experts of Mixtral, Qwen3-MoE and DeepSeek-V3 are quantised, too. GPT-OSS's and Llama 4's stay in bf16:
their weights are (expert, in, out), and torchao 0.18 finds scales along the last axis, but a product sums
along `in`. It raises "unsupported" at GPT-OSS's `grouped_mm`, and "bmm is not supported for TORCH" at Llama
4's `bmm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import PerRow
from torchao_fp8 import quantized
from transformers import (
    DeepseekV3Config,
    DeepseekV3Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    GptOssConfig,
    GptOssModel,
    Llama4TextConfig,
    Llama4TextModel,
    LlamaConfig,
    LlamaModel,
    MixtralConfig,
    MixtralModel,
    Qwen3Config,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
"""Keys and values by way of few columns that all heads share."""

CONFIGS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaModel, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3Model, Qwen3Config(**SIZES)),
    "gemma3": (Gemma3TextModel, Gemma3TextConfig(**SIZES)),
    "gpt_oss": (GptOssModel, GptOssConfig(**SIZES, num_local_experts=4)),
    "mixtral": (MixtralModel, MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3_moe": (Qwen3MoeModel, Qwen3MoeConfig(**SIZES, **FEW, num_experts=4)),
    "deepseek_v3": (
        DeepseekV3Model,
        DeepseekV3Config(
            **LATENT, **FEW, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=0
        ),
    ),
    "llama4": (
        Llama4TextModel,
        Llama4TextConfig(**SIZES, intermediate_size_mlp=512, num_local_experts=4, moe_layers=[0]),
    ),
}

EXPERTS = r"re:.*\.experts\.(gate_up|down)_proj"
"""Parameters of experts (expert, out, in), which torchao multiplies by `scaled_grouped_mm`."""


class Layer(nn.Module):
    """Token numbers (batch, tokens) to hidden states."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        model, config = CONFIGS[name]
        self.model = model(config).to(torch.bfloat16).eval().requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).last_hidden_state


llama, llama_fp8 = Layer("llama"), quantized(Layer("llama"), PerRow())
qwen3, qwen3_fp8 = Layer("qwen3"), quantized(Layer("qwen3"), PerRow())
gemma3, gemma3_fp8 = Layer("gemma3"), quantized(Layer("gemma3"), PerRow())
gpt_oss, gpt_oss_fp8 = Layer("gpt_oss"), quantized(Layer("gpt_oss"), PerRow())
llama4, llama4_fp8 = Layer("llama4"), quantized(Layer("llama4"), PerRow())
mixtral, mixtral_fp8 = Layer("mixtral"), quantized(Layer("mixtral"), PerRow(), EXPERTS)
qwen3_moe, qwen3_moe_fp8 = Layer("qwen3_moe"), quantized(Layer("qwen3_moe"), PerRow(), EXPERTS)
deepseek_v3, deepseek_v3_fp8 = Layer("deepseek_v3"), quantized(Layer("deepseek_v3"), PerRow(), EXPERTS)


def example_inputs() -> tuple[Tensor]:
    return (torch.randint(SIZES["vocab_size"], (2, 64)),)
