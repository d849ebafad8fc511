"""Direct preference optimization from hidden states: `python examples/dpo.py`.

DPO needs only the log-probabilities of chosen and rejected answers. The usual code of the loss
computes all logits of policy and reference. `storage_ops.losses.dpo` computes a tile of them at a
time.
"""

from __future__ import annotations

import torch
from report import DEVICE, report
from torch import nn
from torch.nn import functional as F

import storage_ops
from storage_ops.memory import Measurement, measure

PAIRS, LENGTH, HIDDEN, VOCAB, BETA = 4, 128, 256, 32000, 0.1


class Model(nn.Module):
    """Embedding, one layer and head, as a policy or its reference."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 4, batch_first=True, dropout=0.0)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return hidden states. A causal mask makes this a language model."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        return self.layer(self.embedding(tokens), src_mask=mask, is_causal=True)


def plain(policy: Model, reference: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss by the usual code."""

    def score(model: Model) -> torch.Tensor:
        logits = model.head(model(tokens))[:, :-1]
        picked = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
        return picked[..., 0].sum(-1)

    with torch.no_grad():
        ref = score(reference)
    chosen, rejected = (score(policy) - ref).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def ours(policy: Model, reference: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss without logits.

    The chosen half of the batch comes before the rejected one.
    """
    with torch.no_grad():
        frozen = reference(tokens)
    return storage_ops.losses.dpo(
        policy(tokens), policy.head.weight, tokens, beta=BETA, shift=True,
        ref_input=frozen, ref_weight=reference.head.weight,
    )  # fmt: skip


def main() -> None:
    """Run one step each, from the same weights."""
    torch.manual_seed(0)
    policy, reference = Model().to(DEVICE), Model().to(DEVICE).requires_grad_(False)
    tokens = torch.randint(VOCAB, (2 * PAIRS, LENGTH), device=DEVICE)
    measured: dict[str, Measurement] = {}
    for name, loss in {"plain": plain, "storage_ops.losses.dpo": ours}.items():
        policy.zero_grad()
        with measure(DEVICE) as measured[name]:
            value = loss(policy, reference, tokens)
            value.backward()
        print(f"{name}: loss {value.item():.6f}, gradient {policy.head.weight.grad.norm():.6f}")
    report("DPO, one step", measured)


if __name__ == "__main__":
    main()
