"""Output discarding and selective checkpointing on a GPU give the results of plain autograd."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so

from ..checkpoint.blocks import Model
from .devices import DTYPES, busy, each_device, side_stream

FUSED = torch.nn.attention.SDPBackend


class Block(nn.Module):
    """Attention and SwiGLU with dropout. `way` says how intermediate tensors are freed."""

    def __init__(self, way="plain", width=32, dropout=0.3):
        super().__init__()
        self.way, self.dropout = way, dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.Linear(4 * width, width)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return y.transpose(1, 2).flatten(2)

    def expand(self, x):
        return F.dropout(F.silu(self.gate(x)) * self.up(x), self.dropout, self.training)

    def forward(self, x):
        if self.way == "chain":
            with so.OutputDiscardChain() as chain:
                x = x + self.out(chain.checkpoint(self.attend, x))
                gate, up = chain.checkpoint(self.gate, x), chain.checkpoint(self.up, x)
                return x + self.down(chain.checkpoint(lambda g, u: F.silu(g) * u, gate, up))
        if self.way == "hook":
            ckpt = so.OutputDiscardCheckpoint()
            y = self.out(ckpt.checkpoint(self.attend, x))
            ckpt.discard_output_and_register_recompute(y)
        elif self.way == "discard":
            y = so.output_discard(self.attend, self.out)(x)
        else:
            y = self.out(self.attend(x))
        x = x + y
        if self.way in ("discard", "hook"):
            return x + so.output_discard(self.expand, self.down)(x)
        if self.way == "chain-eager":  # the reference for "chain", also without dropout in the MLP
            return x + self.down(F.silu(self.gate(x)) * self.up(x))
        return x + self.down(self.expand(x))


def gradients(model, x, seed=3):
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    for p in model.parameters():
        p.grad = None
    loss = model(x).double().square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def stacks(way, device, dtype, base="plain"):
    plain = nn.Sequential(*(Block(base) for _ in range(2))).to(device, dtype)
    other = copy.deepcopy(plain)
    for block in other:
        block.way = way
    return plain, other, torch.randn(2, 16, 32, device=device, dtype=dtype)


def assert_equal(ours, right):
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a, b)


@each_device
@pytest.mark.parametrize("way", ["discard", "hook"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_discard_of_every_dtype_with_dropout_equals_eager(path, device, way, dtype):
    plain, ours, x = stacks(way, device, dtype)
    # Fix the attention kernel, because torch could choose another one in the recompute.
    with torch.nn.attention.sdpa_kernel(FUSED.MATH), deterministic():
        assert_equal(gradients(ours, x), gradients(plain, x))


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_every_dtype_equals_eager(path, device, dtype):
    plain, ours, x = stacks("chain", device, dtype, "chain-eager")
    with torch.nn.attention.sdpa_kernel(FUSED.MATH), deterministic():
        assert_equal(gradients(ours, x), gradients(plain, x))


class deterministic:
    """Use deterministic algorithms. Warn for ops that have none."""

    def __enter__(self):
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *error):
        torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [FUSED.FLASH_ATTENTION, FUSED.EFFICIENT_ATTENTION])
def test_fused_attention_with_dropout_is_recomputed_with_its_mask(backend):
    plain, ours, x = stacks("discard", "cuda", torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(backend):
        results = gradients(ours, x), gradients(plain, x)
    for a, b in zip(*results, strict=True):  # the kernels add in any order
        assert (a - b).double().norm() <= 1e-2 * b.double().norm()


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [FUSED.FLASH_ATTENTION, FUSED.EFFICIENT_ATTENTION])
def test_dropout_after_saved_attention_with_dropout_repeats_its_mask(backend):
    plain, ours, x = stacks("plain", "cuda", torch.bfloat16)
    so.apply_activation_checkpoint(ours, {"layer_classes": ["Block"], "policy": "attention"})
    with torch.nn.attention.sdpa_kernel(backend):
        results = gradients(ours, x), gradients(plain, x)
    for a, b in zip(*results, strict=True):  # the kernels add in any order
        assert (a - b).double().norm() <= 1e-2 * b.double().norm()


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_recompute_runs_under_the_autocast_of_the_forward(path, device, dtype):
    plain, ours, x = stacks("discard", device, torch.float32)
    results = []
    for model in (ours, plain):
        torch.manual_seed(3)
        x = x.detach().requires_grad_()
        with torch.autocast(device, dtype), torch.nn.attention.sdpa_kernel(FUSED.MATH):
            loss = model(x).float().square().sum()
        model.zero_grad()
        loss.backward()  # outside of autocast
        results.append([loss.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_equal(*results)


@each_device
def test_random_numbers_after_a_backward_are_those_of_plain(device):
    plain, ours, x = stacks("discard", device, torch.float32)
    after = []
    for model in (ours, plain):
        gradients(model, x)
        after.append((torch.rand(4), torch.rand(4, device=device)))
    assert_equal(*after)


@each_device
def test_a_generator_on_the_device(device):
    generator = torch.Generator(device)
    handle = so.register_rng_tracker(generator)
    x = torch.randn(64, device=device, requires_grad=True)

    def producer(x):
        return x * torch.rand(64, device=device, generator=generator)

    try:
        grads = []
        for way in (so.output_discard(producer, torch.sin), lambda x: torch.sin(producer(x))):
            generator.manual_seed(5)
            grads.append(torch.autograd.grad(way(x).sum(), x)[0])
            grads.append(torch.rand(4, device=device, generator=generator))
    finally:
        handle.remove()
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])


@each_device
@pytest.mark.parametrize("backward", ["same stream", "another stream"])
def test_forward_and_backward_on_a_side_stream(path, device, backward):
    plain, ours, x = stacks("discard", device, torch.float32)
    with torch.nn.attention.sdpa_kernel(FUSED.MATH):
        right = gradients(plain, x)
        for _ in range(3):  # memory that is freed too early is reused in the next round
            torch.manual_seed(3)
            ours.zero_grad()
            leaf = x.detach().requires_grad_()
            with side_stream(device):
                busy(device)
                loss = ours(leaf).double().square().sum()
                if backward == "same stream":
                    loss.backward()
            if backward == "another stream":  # autograd runs each node on the stream of its forward
                loss.backward()
            got = [loss.detach(), leaf.grad, *(p.grad for p in ours.parameters())]
            for a, b in zip(got, right, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.cuda
def test_the_consumer_on_another_stream_than_the_producer(path):
    up, down = nn.Linear(64, 512).cuda(), nn.Linear(512, 64).cuda()
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    right = torch.autograd.grad(down(F.gelu(up(x))).square().sum(), (x, up.weight))
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(3):
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(lambda x: F.gelu(up(x)), x)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            with ckpt.consumer():
                busy("cuda")
                y = down(h)
            ckpt.discard_output_and_register_recompute()  # before the consumer has run
        poison = torch.full((256, 512), float("nan"), device="cuda")
        main.wait_stream(side)
        got = torch.autograd.grad(y.square().sum(), (x, up.weight))
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b)
        assert poison.isnan().all()


@each_device
@pytest.mark.skipif(not so.info()["guard"], reason="no guard for this torch")
def test_reading_a_discarded_output_names_the_region(device):
    x = torch.randn(8, 8, device=device, requires_grad=True)

    def named_region(x):
        return x.exp()

    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(named_region, x)
    with ckpt.consumer():
        y = h.sin()
    ckpt.discard_output_and_register_recompute()
    with pytest.raises(RuntimeError, match="named_region"):
        h + 1
    y.sum().backward()
    torch.testing.assert_close(x.grad, (x.exp().cos() * x.exp()).detach())


@each_device
def test_a_large_buffer_is_compared_without_a_wait_and_written_once(device):
    class Codes(nn.Linear):
        writes = False

        def forward(self, x):
            y = super().forward(x) * self.codes[:64].mean(0)
            if self.writes:
                self.codes.data.mul_(0.5)
            return y.sin()

    plain = Codes(64, 64).to(device)
    plain.register_buffer("codes", torch.randn(4096, 64, device=device))
    layer = so.CheckpointWrapper(copy.deepcopy(plain))
    x = torch.randn(8, 64, device=device)
    for writes in (False, True, True, False):
        plain.writes = layer.writes = writes
        plain(x).sum().backward()
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("error")
        try:
            y = layer(x)
        finally:
            if device != "cpu":
                torch.cuda.set_sync_debug_mode("default")
        y.sum().backward()
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
        assert torch.equal(layer.codes, plain.codes)


@each_device
def test_checksums_detect_a_recompute_that_differs(device):
    x = torch.randn(64, device=device, requires_grad=True)
    calls = []

    def producer(x):
        calls.append(1)
        return x * len(calls)

    y = so.output_discard(producer, torch.sin, determinism_check="checksum")(x)
    with pytest.raises(RuntimeError, match="producer"):
        y.sum().backward()


@each_device
@pytest.mark.parametrize(
    "options",
    [{"mode": "full"}, {"policy": "matmuls"}, {"ops_to_save": ["aten.mm", "aten.bmm"]},
     {"mode": "output_discard"}, {"policy": "every_other_mm"}, {"use_reentrant": True}],
    ids=str,
)  # fmt: skip
def test_layers_by_config_with_dropout_equal_eager(device, options):
    plain = Model(width=32).to(device)
    ours = so.apply_activation_checkpoint(
        copy.deepcopy(plain), {"layer_classes": ["Block"], **options}
    )
    x = torch.randn(2, 16, 32, device=device)
    with deterministic():
        assert_equal(gradients(ours, x), gradients(plain, x))
