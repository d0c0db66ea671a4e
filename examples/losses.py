"""The loss of each token of a language model's head, as evaluation, distillation and reinforcement learning
need it: no logits are written.

python -m cute_backend explain examples/losses.py --arch sm_90a
python -m cute_backend bench examples/losses.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """hidden (rows, width) and weight (vocabulary, width) in bf16, labels (rows,) in int64: (rows,) in
    fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="none")


def example_inputs(rows: int = 4096, vocabulary: int = 128256, width: int = 4096) -> tuple[Tensor, ...]:
    hidden = torch.randn(rows, width, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16) / width**0.5
    labels = torch.randint(0, vocabulary, (rows,))
    labels[::7] = -100  # these rows have no loss
    return hidden, weight, labels
