"""Compare eager code on the other device and on the CPU: `python run.py LIBRARY SEED`."""

import sys
import types

import torch
from torch import nn

import storage_ops as so

DEVICE = "other"


def register(library):
    """Load the device and register the module that torch expects. The CPU draws random numbers."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch.utils.generate_methods_for_privateuse1_backend()
    module = types.ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=0: torch.get_rng_state()
    module.set_rng_state = lambda state, device=0: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.device = lambda index: torch.autograd.profiler.record_function("device")
    torch._register_device_module(DEVICE, module)


def grads_of(fn, *tensors):
    """Return the result of a function and the gradients of its arguments."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    value = fn(*leaves)
    value.backward()
    return [value, *(t.grad for t in leaves if t.requires_grad)]


def same(fn, *tensors):
    """Check that a function has the same result on the device and on the CPU."""
    on_cpu = grads_of(fn, *tensors)
    on_device = grads_of(fn, *(t.to(DEVICE) for t in tensors))
    assert all(t.device.type == DEVICE for t in on_device), [t.device for t in on_device]
    for a, b in zip(on_cpu, on_device, strict=True):
        torch.testing.assert_close(a, b.cpu())


def storage():
    """Free bytes and bind them again."""
    x = torch.randn(64, device=DEVICE)
    y = torch.empty(64, device=DEVICE)
    copied = x.cpu()
    so.discard_storage(y)
    assert so.is_discarded(y) and y.untyped_storage().nbytes() == 0
    so.share_storage(y, x)
    assert not so.is_discarded(y)
    torch.testing.assert_close(y.cpu(), copied)


def discarding():
    """Free an output's bytes in the forward and recompute them in the backward."""
    torch.manual_seed(0)
    up, down = nn.Linear(16, 64), nn.Linear(64, 16)
    freed = []

    def step(x, w_up, w_down):
        def producer(x):
            return torch.sigmoid(x @ w_up.t())

        def consumer(h):
            return h @ w_down.t()

        region = so.OutputDiscardCheckpoint()
        h = region.checkpoint(producer, x)
        with region.consumer():
            y = consumer(h)
        region.discard_output_and_register_recompute()
        freed.append(so.is_discarded(h))
        return y.square().sum()

    same(step, torch.randn(8, 16), up.weight.data, down.weight.data)
    assert freed == [True, True]


def checkpoints():
    """Compare the gradients of a module with those of its full and selective checkpoints."""
    for options in ({}, {"policy": "matmuls"}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        plain = nn.Sequential(net)
        x = torch.randn(4, 16)
        plain(x).sum().backward()
        wanted = [p.grad for p in plain.parameters()]
        other = nn.Sequential(net).to(DEVICE)
        other.zero_grad()
        so.apply_activation_checkpoint(
            other, so.ActivationCheckpointConfig(layer_names=["0"], **options)
        )
        other(x.to(DEVICE)).sum().backward()
        for a, p in zip(wanted, other.parameters(), strict=True):
            torch.testing.assert_close(a.cpu(), p.grad.cpu())


def losses():
    """Compute losses of heads with budgets that need tiles."""
    x, w = torch.randn(64, 16, dtype=torch.double), torch.randn(100, 16, dtype=torch.double)
    t = torch.randint(100, (64,))
    for options in ({}, {"memory_budget": "40KiB"}, {"softcap": 5.0, "z_loss": 0.1}):
        same(lambda x, w, t, o=options: so.linear_cross_entropy(x, w, t, **o), x, w, t)
    moved = (v.to(DEVICE) for v in (x, w, t))
    _, largest = so.linear_cross_entropy(*moved, returns=("loss", "argmax"))
    assert torch.equal(largest.cpu(), (x @ w.t()).argmax(-1))
    teacher, head = torch.randn(64, 16).double(), torch.randn(100, 16).double()

    def kl(x, w):
        return so.linear_kl_div(x, w, teacher.to(x.device), head.to(x.device))

    same(kl, x, w)
    same(lambda x, w, t: so.losses.sft(x, w, t), x, w, t)


def tiles():
    """Run a module in tiles."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(DEVICE)
    x = torch.randn(2, 12, 16, device=DEVICE)
    plain = net(x).cpu()
    torch.testing.assert_close(so.tile(net, tiles=3)(x).cpu(), plain)


if __name__ == "__main__":
    register(sys.argv[1])
    for part in (storage, discarding, checkpoints, losses, tiles):
        torch.manual_seed(int(sys.argv[2]))
        part()
        print(part.__name__)
