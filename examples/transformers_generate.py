"""A Hugging Face model, compiled in place: called by keywords, then generating with a static cache.

    pip install transformers
    python examples/transformers_generate.py

Nothing is downloaded: the model is a small Llama with random weights. Runs on a GPU if there is one, else on
the CPU, where fused regions are computed with aten.
"""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

PROMPT, NEW = 16, 4


def make_model(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval().requires_grad_(False)


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(device)
    tokens = torch.randint(512, (2, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    expected = model(input_ids=tokens, logits_to_keep=1).logits

    model.compile(backend="cute")
    logits = model(input_ids=tokens, logits_to_keep=1).logits
    prefill = counters["cute_backend"]["regions"]

    how = CompileConfig(backend="cute", mode="default", fullgraph=False)
    how._compile_all_devices = True  # transformers compiles the decoding step on GPUs alone by default
    generated = make_model(device).generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="static",
        compile_config=how,
        pad_token_id=0,
    )
    decoding = counters["cute_backend"]["regions"] - prefill
    error = ((logits.double() - expected.double()).norm() / expected.double().norm()).item()
    print(f"logits differ from eager's by {error:.2%} in norm; generated {tuple(generated.shape)}")
    print(f"fused regions: {prefill} in the prompt's graph, {decoding} in the decoding step's")
    return 0 if error < 0.02 and prefill and decoding and generated.shape[1] == PROMPT + NEW else 1


if __name__ == "__main__":
    raise SystemExit(main())
