"""Whole models that are timed: layers of Hugging Face's and diffusers' classes at their real widths, with
random weights. To add a model, add a line to MODELS."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cute_backend.errors import UsageError

LAYERS = 2
"""Layers of each model: two, so that the end of one and the start of the next are timed, but compile
quickly."""


@dataclass(frozen=True)
class Model:
    """A model with its inputs. `make` takes a number of layers, and returns a module and its arguments, in
    torch's default dtype and on its default device; training needs a gradient of the first argument.

    `depth` is the number of layers of the model whose widths these are. `packages` have to be installed.
    torchao quantises the linears of an `fp8` model, with a scale for each row. A step of one that `trains` is
    a forward and a backward pass, with the gradients of all weights.
    """

    name: str
    make: Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]
    packages: tuple[str, ...] = ("transformers",)
    fp8: bool = False
    trains: bool = False
    depth: int = LAYERS

    @property
    def lacks(self) -> str:
        """The packages that aren't installed, with commas between them."""
        needed = (*self.packages, *(("torchao",) if self.fp8 else ()))
        return ", ".join(each for each in needed if importlib.util.find_spec(each) is None)

    def build(self, layers: int = LAYERS) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module in bf16 as it is timed, and its arguments, on torch's default device."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            module, args = self.make(layers)
        finally:
            torch.set_default_dtype(before)
        if self.trains:
            first = args[0].detach().requires_grad_()
            return module.train(), (first, *args[1:])
        module = module.eval().requires_grad_(False)
        if self.fp8:
            quantise(module)
        return module, args


def quantise(module: nn.Module) -> None:
    """Quantises the linears of a module to fp8, in place, with torchao's rowwise scales."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    quantize_(
        module,
        Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(), kernel_preference=KernelPreference.TORCH, set_inductor_config=False
        ),
    )


class _States(nn.Module):
    """A Hugging Face model that takes embedded inputs. Returns the states after its last layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


class _Images(nn.Module):
    """A vision model. Takes images (batch, 3, height, width)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).last_hidden_state


def _states(name: str, batch: int, tokens: int, **sizes: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model that transformers calls `name`, and embedded inputs (batch, tokens, hidden_size)."""
    import transformers

    config = getattr(transformers, f"{name.removesuffix('Model')}Config")(vocab_size=64, **sizes)
    model = getattr(transformers, name)(config)
    model.config.use_cache = False
    return _States(model), (_randn(batch, tokens, config.hidden_size),)


def _decoder(name: str, **sizes: Any) -> Callable[[int, int, int], tuple[nn.Module, tuple[Tensor, ...]]]:
    return lambda batch, tokens, layers: _states(
        name, batch, tokens, num_hidden_layers=layers, max_position_embeddings=8192, **sizes
    )


_DECODERS = {
    "llama": _decoder(
        "LlamaModel",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "qwen3": _decoder(
        "Qwen3Model",
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "gemma3": _decoder(
        "Gemma3TextModel",
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
    ),
}
"""Widths of Llama 3 8B, Qwen3 8B and Gemma 3 4B."""

_DEPTHS = {"llama": 32, "qwen3": 36, "gemma3": 34}
"""Layers of these."""


def _gpt2(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """GPT-2 medium, without dropout, so that results can be compared."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _states("GPT2Model", 8, 1024, n_embd=1024, n_head=16, n_layer=layers, **rates)


def _bert(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    return _states("BertModel", 32, 512, num_hidden_layers=layers, **sizes)


def _vit(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096
    )
    return _Images(ViTModel(config, add_pooling_layer=False)), (_randn(64, 3, 224, 224),)


class _DiT(nn.Module):
    """Blocks of a DiT-XL, each modulated by an embedding (batch, width)."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, time)
        return x


class _DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        from diffusers.models.attention_processor import Attention

        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(width, heads=heads, dim_head=width // heads, bias=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        hidden = nn.functional.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gate2 * self.down(hidden)


def _dit(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """DiT-XL/2 at 512 x 512: 8 images of 1,024 tokens."""
    return _DiT(1152, 16, layers), (_randn(8, 1024, 1152), _randn(8, 1152))


def _flux(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A block of Flux at 1024 x 1024, whatever the number of layers: 4,096 tokens of the image and 512 of the
    text."""
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    block = FluxTransformerBlock(3072, 24, 128)
    return block, (_randn(1, 4096, 3072), _randn(1, 512, 3072), _randn(1, 3072))


class _Loss(nn.Module):
    """The head of a language model and its cross entropy, softcapped in fp32 where a `cap` is given."""

    def __init__(self, width: int, words: int, cap: float | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(width, words, bias=False)
        self.cap = cap

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x).float()
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return nn.functional.cross_entropy(logits, target)


def _loss(
    tokens: int, width: int, words: int, cap: float | None = None
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _Loss(width, words, cap), (_randn(tokens, width), torch.randint(words, (tokens,)))


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape)


def _served(family: str, fp8: bool) -> Sequence[Model]:
    """A decoder at 2,048 tokens of one text, at one token of each of 64 texts, and at one token."""
    name = f"{family}-{'fp8' if fp8 else 'bf16'}"
    sizes = {"2048": (1, 2048), "64": (64, 1), "1": (1, 1)}
    return [
        Model(f"{name}-{tokens}", partial(_DECODERS[family], *shape), fp8=fp8, depth=_DEPTHS[family])
        for tokens, shape in sizes.items()
    ]


MODELS = (
    *_served("llama", fp8=False),
    *_served("llama", fp8=True),
    Model("bert-bf16", _bert, depth=24),
    Model("vit-bf16", _vit, depth=24),
    Model("gpt2-training", _gpt2, trains=True, depth=24),
    Model("llama-training", partial(_DECODERS["llama"], 2, 2048), trains=True, depth=_DEPTHS["llama"]),
    *_served("qwen3", fp8=False),
    *_served("qwen3", fp8=True),
    *_served("gemma3", fp8=False),
    *_served("gemma3", fp8=True),
    Model("bert-fp8", _bert, fp8=True, depth=24),
    Model("vit-fp8", _vit, fp8=True, depth=24),
    Model("loss", lambda layers: _loss(4096, 4096, 128256), ()),
    Model("loss-training", lambda layers: _loss(4096, 4096, 128256), (), trains=True),
    Model("softcapped-loss-training", lambda layers: _loss(2048, 3584, 256000, 30.0), (), trains=True),
    Model("dit-bf16", _dit, ("diffusers",), depth=28),
    Model("flux-bf16", _flux, ("diffusers",)),
)
"""The models, in order of importance. The losses are of the heads of Llama 3 8B and Gemma 2 9B."""


def select(patterns: Sequence[str]) -> list[Model]:
    """The models whose names match one of the patterns, or all without any. Raises UsageError."""
    for pattern in patterns:
        if not any(fnmatchcase(model.name, pattern) for model in MODELS):
            names = ", ".join(model.name for model in MODELS)
            raise UsageError(f"the model {pattern!r} is none of {names}")
    return [
        model
        for model in MODELS
        if not patterns or any(fnmatchcase(model.name, pattern) for pattern in patterns)
    ]
