"""The arguments of the op, by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from storage_ops.loss import call as loss_call
from storage_ops.loss.call import arithmetic
from storage_ops.loss.planning.cost import STATE_ROWS

IGNORED = -100


class DivergenceCall(NamedTuple):
    """The arguments of `storage_ops::linear_kl_div`, in the order of its schema.

    The fields are the arguments of the public function. `log_probs` and `ids` are `teacher_topk`, a
    soft-cap of None is 0, and `group` is the name of the process group, or "".

    Attributes:
        tail: with `ids`, whether all other classes count as one more class.
        in_forward: whether the forward computes the gradients, for a loss that is a mean or a sum.
        grad_mask: whether input, weight and bias need gradients.
    """

    input: Tensor
    weight: Tensor
    teacher_input: Tensor | None = None
    teacher_weight: Tensor | None = None
    bias: Tensor | None = None
    teacher_bias: Tensor | None = None
    token_weight: Tensor | None = None
    log_probs: Tensor | None = None
    ids: Tensor | None = None
    divergence: str = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    softcap: float = 0.0
    teacher_softcap: float = 0.0
    tail: bool = True
    reduction: str = "mean"
    shift: bool = False
    valid_classes: int | None = None
    max_valid: int | None = None
    memory_budget: int | None = None
    group: str = ""
    in_forward: bool = True
    grad_mask: tuple[bool, ...] = (True, True, False)
    target: Tensor | None = None
    target_weight: float = 0.0
    gradient_tolerance: float = 0.0

    @property
    def own_rows(self) -> int:
        """Return how many numbers per token the divergence keeps for the backward."""
        return 3 if self.ids is None else self.ids.shape[-1] + 1

    @property
    def state_rows(self) -> int:
        """Return how many numbers per token are kept, with those of the targets' cross-entropy."""
        return self.own_rows + (0 if self.target is None else STATE_ROWS)

    def as_loss(self) -> loss_call.Call:
        """Return the student's part as a call of linear cross-entropy.

        It has the same tokens, weights and sums. Without targets, the targets of this call only
        mark ignored tokens. Ranks compare such calls; the other options are in the plan's name.
        """
        teacher = () if self.teacher_input is None else self.teacher_input.shape[-1:]
        own = (self.divergence, self.beta, self.softcap, self.teacher_softcap, *teacher)
        target = self.target
        if target is None:
            target = torch.zeros(self.input.shape[:-1], dtype=torch.int64, device=self.input.device)
        return loss_call.Call(
            self.input,
            self.weight,
            target,
            self.bias,
            token_weight=self.token_weight,
            reduction=self.reduction,
            ignore_index=IGNORED,
            shift=self.shift,
            max_valid=self.max_valid,
            logit_scale=1 / self.temperature,
            memory_budget=self.memory_budget,
            plan=repr(own) if self.group else "",
            group=self.group,
            in_forward=self.in_forward,
            grad_mask=self.grad_mask,
            valid_classes=self.valid_classes,
            gradient_tolerance=self.gradient_tolerance,
        )

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of all arithmetic but matrix products."""
        return arithmetic(self.input.dtype)
