"""Schedules that compute gradients of inputs first and those of weights later, in parts."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import storage_ops as so

from ..ranks import run_on_ranks

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

WIDTH = 6
MODES = ("full", "selective", "save_on_cpu", "output_discard", "composed", "hook", "chain")


class Block(nn.Module):
    """SwiGLU, with two weights whose gradients come in separate passes."""

    def __init__(self, mode):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.drop, self.mode = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.3), mode

    def act(self, x):
        return self.drop(nn.functional.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        if self.mode == "composed":
            return x + so.output_discard(self.act, lambda h: self.down(torch.tanh(h)))(x)
        if self.mode == "hook":
            ckpt = so.OutputDiscardCheckpoint()
            y = self.down(torch.tanh(ckpt.checkpoint(self.act, x)))
            ckpt.discard_output_and_register_recompute(y)
            return x + y
        if self.mode == "chain":
            with so.OutputDiscardChain() as chain:
                h = chain.checkpoint(torch.tanh, chain.checkpoint(self.act, x))
                return x + self.down(h)
        return x + self.down(torch.tanh(self.act(x)))


def stage(mode, seed, layers=3):
    torch.manual_seed(seed)
    net = nn.Sequential(*(Block(mode) for _ in range(layers))).double()
    config = {"layer_classes": ["Block"], "mode": mode}
    if mode in ("selective", "save_on_cpu"):
        config |= {"mode": "selective", "ops_to_save": ["aten.addmm", "aten.native_dropout"]}
        config["respect_saved_tensors_hooks"] = mode == "save_on_cpu"
    if mode in ("full", "selective", "save_on_cpu", "output_discard"):
        so.apply_activation_checkpoint(net, config)
    return net


@pytest.mark.filterwarnings("ignore:.*saves nothing")
@pytest.mark.parametrize("mode", MODES)
def test_inputs_first_then_weights_in_parts(mode):
    seed = torch.random.initial_seed()
    x, g = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    results = []
    for way in ("plain", mode):
        net, leaf = stage(way, seed), x.clone().requires_grad_()
        inside = []
        net[1].gate.register_forward_pre_hook(
            lambda _, args, inside=inside: inside.append(weakref.ref(args[0]))
        )
        torch.manual_seed(seed)
        offloads = way == "save_on_cpu"
        with torch.autograd.graph.save_on_cpu() if offloads else contextlib.nullcontext():
            y = net(leaf)
        if way == "plain":
            y.backward(g)
            results.append([leaf.grad, *(p.grad for p in net.parameters())])
            continue
        (dx,), groups = stage_backward_input([y], [g], [leaf], net.parameters())
        assert len(groups) > 3  # weights of one block are in several
        stage_backward_weight(net.parameters(), groups)
        results.append([dx, *(p.grad for p in net.parameters())])
        del y, dx, groups
        gc.collect()
        assert inside and not any(ref() is not None for ref in inside)
    for right, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


STAGES, BATCHES = 4, 4


def pipeline(rank):
    """Four stages on two ranks equal the whole on one."""
    seed = torch.random.initial_seed()
    torch.manual_seed(seed)
    x, target = torch.randn(2, 2 * BATCHES, WIDTH, dtype=torch.float64)
    for mode in MODES[:2] + MODES[3:]:
        whole = nn.Sequential(*(stage("plain", seed + i, 2) for i in range(STAGES))).eval()
        losses = [
            (whole(a) - b).square().mean()
            for a, b in zip(x.chunk(BATCHES), target.chunk(BATCHES), strict=True)
        ]
        (sum(losses) / BATCHES).backward()
        mine = range(rank, STAGES, 2)
        nets = [stage(mode, seed + i, 2).eval() for i in mine]
        stages = [
            PipelineStage(net, i, STAGES, torch.device("cpu"))
            for i, net in zip(mine, nets, strict=True)
        ]
        schedule = ScheduleInterleavedZeroBubble(
            stages, BATCHES, loss_fn=lambda y, t: (y - t).square().mean()
        )
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
        for i, net in zip(mine, nets, strict=True):
            for right, p in zip(whole[i].parameters(), net.parameters(), strict=True):
                torch.testing.assert_close(p.grad, right.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.in_turn
def test_a_zero_bubble_schedule():
    run_on_ranks(pipeline, 2)
