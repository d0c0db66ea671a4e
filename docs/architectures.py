"""One layer of many architectures, of the classes of transformers and diffusers, with random weights in bf16.

Nothing is downloaded. Widths are small; the layers and the ops between them are those of the real models.
Importing this module brings neither package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, TOKENS = 256, 4, 64

_DECODER: dict[str, Any] = {
    "vocab_size": 512,
    "pad_token_id": 0,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
}
_OF_HEADS = {key: value for key, value in _DECODER.items() if key not in ("num_key_value_heads", "head_dim")}
_IMAGE = {**_OF_HEADS, "image_size": 64, "patch_size": 8}
_STAGES = {"image_size": 64, "patch_size": 4}

Case = tuple[nn.Module, tuple[Tensor, ...]]


def _of_transformers(name: str, part: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, f"{name}{part}")(getattr(transformers, f"{name}Config")(**sizes))


class _States(nn.Module):
    """A model of tokens that are embedded already. Returns the states after its last layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


class _First(nn.Module):
    """A model that is called with `given`. Returns its first result."""

    def __init__(self, model: nn.Module, given: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(given)

    def forward(self, *args: Tensor) -> Tensor:
        result = self.model(**dict(zip(self.names, args, strict=True)), return_dict=False)
        return result[0]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def _text(name: str, **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = _of_transformers(name, "Model", {**_DECODER, **sizes})
        model.config.use_cache = False
        return _States(model), (_random(2, TOKENS, WIDTH),)

    return make


def _encoder(name: str, part: str = "Model", **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        return _States(_of_transformers(name, part, {**_OF_HEADS, **sizes})), (_random(2, TOKENS, WIDTH),)

    return make


def _vision(name: str, base: dict[str, Any] = _IMAGE, **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = _of_transformers(name, "Model", {**base, **sizes})
        given = {"pixel_values": _random(2, 3, base["image_size"], base["image_size"])}
        return _First(model, given), tuple(given.values())

    return make


def _whisper() -> Case:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": WIDTH, "encoder_layers": 1, "encoder_attention_heads": HEADS, "encoder_ffn_dim": 512}
    config = transformers.WhisperConfig(**sizes, num_mel_bins=16, max_source_positions=TOKENS)
    given = {"input_features": _random(2, 16, 2 * TOKENS)}
    return _First(WhisperEncoder(config), given), tuple(given.values())


def _diffusion(name: str, given: Callable[[], dict[str, Tensor]], **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        import diffusers

        inputs = given()
        return _First(getattr(diffusers, name)(**sizes), inputs), tuple(inputs.values())

    return make


def _flux() -> Case:
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    block = FluxTransformerBlock(WIDTH, HEADS, WIDTH // HEADS)
    return block, (_random(1, 96, WIDTH), _random(1, 32, WIDTH), _random(1, WIDTH))


_LATENT = {"attention_head_dim": WIDTH // HEADS, "num_attention_heads": HEADS, "num_layers": 1}
_STEP = {"timestep": torch.tensor([500, 10])}

ARCHITECTURES: dict[str, Callable[[], Case]] = {
    "mistral": _text("Mistral"),
    "qwen2": _text("Qwen2"),
    "gemma": _text("Gemma"),
    "gemma2": _text("Gemma2"),
    "phi": _text("Phi"),
    "phi3": _text("Phi3"),
    "gpt2": _text("GPT2", n_embd=WIDTH, n_head=HEADS, n_layer=1),
    "gpt_neox": _text("GPTNeoX"),
    "gptj": _text("GPTJ", n_embd=WIDTH, n_head=HEADS, n_layer=1, rotary_dim=32),
    "opt": _text("OPT", ffn_dim=512, word_embed_proj_dim=WIDTH),
    "bloom": _text("Bloom", n_layer=1, n_head=HEADS),
    "mpt": _text("Mpt", d_model=WIDTH, n_heads=HEADS, n_layers=1),
    "stablelm": _text("StableLm"),
    "starcoder2": _text("Starcoder2"),
    "cohere": _text("Cohere"),
    "cohere2": _text("Cohere2"),
    "olmo": _text("Olmo"),
    "olmo2": _text("Olmo2"),
    "granite": _text("Granite"),
    "nemotron": _text("Nemotron"),
    "smollm3": _text("SmolLM3"),
    "glm4": _text("Glm4"),
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "electra": _encoder("Electra", embedding_size=WIDTH),
    "distilbert": _encoder("DistilBert", dim=WIDTH, hidden_dim=512, n_layers=1, n_heads=HEADS),
    "modernbert": _encoder("ModernBert"),
    "mpnet": _encoder("MPNet"),
    "t5_encoder": _encoder("T5", "EncoderModel", d_model=WIDTH, d_ff=512, num_layers=1, num_heads=HEADS),
    "whisper_encoder": _whisper,
    "vit": _vision("ViT"),
    "deit": _vision("DeiT"),
    "beit": _vision("Beit"),
    "dinov2": _vision("Dinov2"),
    "siglip": _vision("SiglipVision"),
    "clip": _vision("CLIPVision"),
    "swin": _vision("Swin", _STAGES, embed_dim=64, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "convnext": _vision("ConvNext", _STAGES, depths=[1, 1, 1, 1], hidden_sizes=[64, 64, 128, 256]),
    "flux": _flux,
    "sd3": _diffusion(
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": _random(2, 16, 16, 16),
            "encoder_hidden_states": _random(2, 32, WIDTH),
            "pooled_projections": _random(2, WIDTH),
            **_STEP,
        },
        **_LATENT,
        sample_size=16,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
    ),
    "pixart": _diffusion(
        "PixArtTransformer2DModel",
        lambda: {
            "hidden_states": _random(2, 4, 16, 16),
            "encoder_hidden_states": _random(2, 32, WIDTH),
            **_STEP,
        },
        **_LATENT,
        sample_size=16,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
    ),
    "sana": _diffusion(
        "SanaTransformer2DModel",
        lambda: {
            "hidden_states": _random(2, 32, 16, 16),
            "encoder_hidden_states": _random(2, 32, WIDTH),
            **_STEP,
        },
        **_LATENT,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=WIDTH // HEADS,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
        sample_size=16,
    ),
}


def architecture(name: str) -> Case:
    """A module in bf16, which neither trains nor has a cache, and its arguments."""
    torch.manual_seed(0)
    module, args = ARCHITECTURES[name]()
    return module.to(torch.bfloat16).eval().requires_grad_(False), args
