"""Checks that the output of a tiled module at a token depends on no other token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from storage_ops.checkpoint.layers.last_product import PLAIN
from storage_ops.checkpoint.layers.tile_run import TiledModule, fail
from storage_ops.checkpoint.state.execution import ExecutionState
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.unchanged import places_of, replaced

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _as_it_is(t: Tensor) -> Tensor:
    return t


def can_check(tiled: TiledModule, x: Tensor) -> bool:
    """Return True if `check` can detect a dependence in this call.

    It needs gradients and values, and no dispatch mode: such a mode may record the check's ops for
    a checkpoint, or make tensors fake. Whole numbers, such as token ids, have no gradients.
    """
    has_tokens = x.numel() > 0 and x.shape[tiled.dim] > 2
    is_differentiable = x.is_floating_point() or x.is_complex()
    has_gradients = is_differentiable and not torch.is_inference_mode_enabled()
    return has_tokens and has_gradients and not torch._C._len_torch_dispatch_stack()


def _has_zeros(p: Tensor) -> bool:
    if type(p) is not nn.Parameter or p.dtype not in _FLOATS or p.numel() == 0:
        return False
    # The norm of order -inf is the smallest magnitude. torch computes it without a temporary
    # tensor.
    return not torch.linalg.vector_norm(p.detach().flatten(), -torch.inf)


def _without_zeros(t: Tensor) -> Tensor:
    """Return a detached copy of a tensor with positive random numbers in place of zeros."""
    t = t.detach()
    random = torch.rand_like(t).add_(0.5).div_(max(t.shape[-1:], default=1) ** 0.5)
    return torch.where(t == 0, random, t)


def check(tiled: TiledModule, x: Tensor) -> bool:
    """Raise an error for a module whose output at a token depends on other tokens.

    The check runs the module on three tokens. It computes the gradient of the output at the middle
    token with respect to the input at the other two. In a token-wise module this gradient is zero.
    A parameter that is initially zero, such as a gate, would hide a dependence. So the check
    replaces zeros in parameters and in the input by random numbers.

    Returns:
        True, or False if the output requires no gradient, so that a dependence cannot be detected.

    Raises:
        ValueError: the gradient is not zero.
        RuntimeError: the module uses a tensor that requires grad and is not its parameter.
    """
    parameters = list(tiled.host.parameters())
    state = ExecutionState(Surroundings.of(tiled.host.run, [], [x]), preserve_rng_state=True)
    copies = {b: b.clone() for b in tiled.host.buffers()}
    # The surrounding hooks count saved tensors, so use other hooks here.
    own = saved_tensors_hooks(_as_it_is, _as_it_is)
    with state, torch.enable_grad(), own:
        for p in parameters:
            if _has_zeros(p):
                copies[p] = _without_zeros(p).requires_grad_(p.requires_grad)
            elif p.grad_fn is not None:  # of `functional_call`; a call detaches it, too
                copies[p] = p.detach().requires_grad_()
        places = [(at, name, copies[t]) for at, name, t in places_of(tiled.host) if t in copies]
        tile = x.detach().narrow(tiled.dim, 0, 3)
        tile = (_without_zeros(tile) if type(x) in PLAIN else tile.clone()).requires_grad_()
        with replaced(places):
            out = tiled.output_of(tile)
        tiled.check_leaves(out, [tile, *parameters, *copies.values()])
        if not out.requires_grad:
            return False
        middle = out.narrow(tiled.dim, 1, 1)
        (gradient,) = torch.autograd.grad(
            middle, tile, torch.rand_like(middle) + 0.5, allow_unused=True
        )
    if gradient is not None and any(
        gradient.narrow(tiled.dim, other, 1).ne(0).any() for other in (0, 2)
    ):
        fail(
            tiled.name,
            f"is not token-wise: its output at one place of dimension {tiled.dim} depends on its "
            "input at another. Expected a module such as an MLP or a norm of the last dimension.",
            ValueError,
        )
    return True
