"""Peak memory on a GPU is as computed, to the byte if only the allocator determines it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import storage_ops as so
from benchmarks._blocks import PUBLISHED_BLOCKS, WAYS, stack, step
from storage_ops.loss.planning import planner
from storage_ops.matmul import Kind, aten
from storage_ops.matmul.interface import SLICE

from .devices import each_device, requested

N = 4 << 20  # bytes of a tensor
LAYERS = 5
NO_RANDOM = {"preserve_rng_state": False}  # on a CPU, the saved random state would count


def producer(x):
    return x.square().exp()


def forward(way, x):
    for _ in range(LAYERS):
        if way == "discard":
            x = so.output_discard(producer, torch.sin, **NO_RANDOM)(x)
        elif way == "checkpoint":
            x = checkpoint(producer, x, use_reentrant=False, **NO_RANDOM).sin()
        else:
            x = producer(x).sin()
    return x


def measured(way, device):
    """Return peak and kept bytes of a forward, and the peak of its backward."""
    with requested(device):  # so that releases of tensors allocated here count later
        x = torch.randn(N // 4, device=device).requires_grad_()
        upstream, x.grad = torch.ones_like(x), torch.zeros_like(x)
    with requested(device) as in_forward:
        y = forward(way, x)
    with requested(device) as in_backward:
        y.backward(upstream)
    assert in_backward.kept_bytes == -in_forward.kept_bytes + N  # only y is still alive
    peaks = in_forward.peak_bytes / N, in_backward.peak_bytes / N
    return peaks[0], in_forward.kept_bytes / N, peaks[1]


@each_device
def test_a_stack_of_regions_to_the_byte(path, device):
    # Forward: the plain stack saves the input and the exponential of each layer, whose output is
    # the next input. The peak is in the last layer, where the square or the sine also exists.
    plain = measured("plain", device)
    assert plain[:2] == (2 * LAYERS, 2 * LAYERS)
    # A checkpoint saves nothing inside of the producer, but sine saves the producer's output.
    theirs = measured("checkpoint", device)
    assert theirs[:2] == (2 * LAYERS, 2 * LAYERS)
    # With discarding, only the inputs remain: one tensor per layer.
    ours = measured("discard", device)
    assert ours[:2] == (LAYERS + 1, LAYERS)
    # Backward, additionally: the cosine, its product with the gradient, and the next gradient. With
    # discarding, also the recomputed exponential.
    assert (plain[2], theirs[2], ours[2]) == (3, 3, 4)


@each_device
@pytest.mark.parametrize("name", ["output_discard", "full"])
def test_layers_by_config_to_the_byte(device, name):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return producer(x)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x).sin()

    cfg = {"layer_classes": ["Layer"], "mode": name, **NO_RANDOM}
    net = so.apply_activation_checkpoint(Net(), cfg)
    x = torch.randn(N // 4, device=device).requires_grad_()
    with requested(device) as m:
        y = net(x)
    assert m.kept_bytes == (N if name == "output_discard" else 2 * N)
    y.sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PUBLISHED_BLOCKS)
def test_the_peak_of_a_block_is_the_estimated_one(name, way):
    sizes = (2, 256, 1024, torch.float32)
    blocks, x = stack(name, *sizes, "cuda"), torch.randn(2, 512, 256, device="cuda")
    x.requires_grad_()
    step(blocks, x, WAYS[way])  # allocates the workspaces of cuBLAS
    x.grad = None
    blocks.zero_grad()
    inputs = x.nbytes + sum(p.nbytes for p in blocks.parameters())
    with so.memory.measure("cuda") as m:
        result = step(blocks, x, WAYS[way])
    del result
    fake, twin = stack(name, *sizes, "meta"), torch.randn(2, 512, 256, device="meta")
    estimated = so.memory.estimate(step, fake, twin.requires_grad_(), WAYS[way])
    assert m.peak_bytes + inputs == estimated.peak_bytes


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["mm", "mm to fp32", "addmm to fp32"])
def test_products_take_a_workspace_once(kind):
    # An earlier run excludes the workspace in other tests. The allocator provides it, so it counts.
    left, right = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    out = torch.zeros(512, 512, device="cuda", dtype=torch.float32 if "fp32" in kind else None)
    out = out if "fp32" in kind else out.bfloat16()

    def product():
        if kind == "mm":
            torch.mm(left, right, out=out)
        elif kind == "mm to fp32":
            torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)
        else:
            aten.multiply(left, right, out, add=True)

    torch._C._cuda_clearCublasWorkspaces()
    with requested("cuda") as first:
        product()
    with requested("cuda") as second:
        product()
    print(f"{kind}: a workspace of {first.kept_bytes} bytes")
    assert first.kept_bytes <= 64 << 20
    assert second.kept_bytes == 0
    assert second.peak_bytes <= (4 * SLICE * 512 if kind == "addmm to fp32" else 0)


@pytest.mark.cuda  # for the CPU: tests/loss/test_planner.py
@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("share", [0.5, 1 / 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_keeps_to_its_budget_and_plan(dtype, share, grads, reduction):
    device, tokens, hidden, vocab = "cuda", 2048, 128, 16000
    x = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_(grads[0])
    w = torch.randn(vocab, hidden, device=device).to(dtype).requires_grad_(grads[1])
    target = torch.randint(vocab, (tokens,), device=device)
    budget = int(tokens * vocab * dtype.itemsize * share)

    def run():
        loss = so.linear_cross_entropy(x, w, target, memory_budget=budget, reduction=reduction)
        if any(grads):
            loss.sum().backward()

    run()
    x.grad = w.grad = None
    chosen = []
    choose = planner.choose

    def noted(p, *args, **kwargs):
        chosen.append((p, choose(p, *args, **kwargs)))
        return chosen[-1][1]

    planner.choose = noted
    try:
        with requested(device) as m:
            run()
    finally:
        planner.choose = choose
    returned = sum(t.grad.nbytes for t in (x, w) if t.grad is not None)
    assert m.peak_bytes - returned <= budget
    if reduction == "mean":  # otherwise the forward runs before gradients exist
        ((problem, plan),) = chosen
        assert m.peak_bytes - returned <= plan.peak_bytes
        # 16-bit products may take less than the plan reserves for them.
        sizes = (plan.rows, plan.widest, hidden, True)
        reserved = max(problem.matmul.scratch_bytes(kind, *sizes) for kind in Kind)
        assert m.peak_bytes >= 0.95 * plan.peak_bytes - reserved


@each_device
def test_the_logits_are_never_allocated(device):
    tokens, hidden, vocab = 4096, 64, 50257
    x = torch.randn(tokens, hidden, device=device, requires_grad=True)
    w = torch.randn(vocab, hidden, device=device, requires_grad=True)
    target = torch.randint(vocab, (tokens,), device=device)
    so.linear_cross_entropy(x[:8], w, target[:8]).backward()
    x.grad = w.grad = None
    budget = tokens * vocab  # a quarter of the logits, while a GPU's default is all of them
    with requested(device) as m:
        so.linear_cross_entropy(x, w, target, memory_budget=budget).backward()
    assert m.peak_bytes < tokens * vocab * 4 / 3
    assert m.kept_bytes == pytest.approx(x.nbytes + w.nbytes, abs=1 << 12)
