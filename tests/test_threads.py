"""Several threads train at once, each as if it were alone, on free-threaded CPython in parallel.

A thread begins with parts that no thread has called before. So other threads read registrations,
plans and caches of the process while it writes them.
"""

import gc
import subprocess
import sys
import sysconfig
import threading
from functools import partial

import pytest
import torch
from torch import nn

import storage_ops as so

STEPS = 6
FREE = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def regions():
    up, down = nn.Linear(16, 32, dtype=torch.float64), nn.Linear(32, 16, dtype=torch.float64)
    block = so.output_discard(lambda x: torch.tanh(up(x)), down)
    return [up, down], lambda x: block(x).square().mean()


def chain():
    layers = [nn.Linear(16, 16, dtype=torch.float64) for _ in range(3)]

    def loss(x):
        with so.OutputDiscardChain() as run:
            for layer in layers:
                x = run.checkpoint(lambda x, layer=layer: layer(x).sin(), x)
            return x.square().mean()

    return layers, loss


def selective():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    model = nn.Sequential(layer)
    config = so.ActivationCheckpointConfig(
        layer_classes=["TransformerEncoderLayer"], use_reentrant=False, ops_to_save=["aten.addmm"]
    )
    so.apply_activation_checkpoint(model, config)
    return [model], lambda x: model(x).square().mean()


def shared():
    layer = nn.Linear(16, 16, dtype=torch.float64)

    def loss(x):
        h = layer(x)
        y = h.sin().square().mean()
        with torch.no_grad():
            src = layer(x)
        so.discard_storage(h)
        so.share_storage(h, src)
        return y

    return [layer], loss


def head(**options):
    weight = nn.Parameter(torch.empty(97, 16, dtype=torch.float64))
    target = torch.arange(24).reshape(2, 12) % 97

    def loss(x):
        return so.linear_cross_entropy(x, weight, target, **options).mean()

    return [nn.ParameterList([weight])], loss


def divergence():
    weight = nn.Parameter(torch.empty(97, 16, dtype=torch.float64))
    teacher = torch.arange(97.0 * 16, dtype=torch.float64).reshape(97, 16).sin()

    def loss(x):
        return so.linear_kl_div(x, weight, x.detach().cos(), teacher, memory_budget=40_000)

    return [nn.ParameterList([weight])], loss


PARTS = {
    "regions": regions,
    "chain": chain,
    "selective": selective,
    "shared": shared,
    "head": head,
    "head in little memory": lambda: head(memory_budget=60_000),
    "head with results per token": lambda: head(reduction="none"),
    "divergence": divergence,
}


def train(part, seed):
    """Return the losses and input gradients of some steps of SGD."""
    generator = torch.Generator().manual_seed(seed)
    modules, loss = PARTS[part]()
    parameters = [p for module in modules for p in module.parameters()]
    with torch.no_grad():
        for p in parameters:
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 4)
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(STEPS):
        x = torch.randn(2, 12, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        value = loss(x)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((value.item(), x.grad))
    return losses


def at_once(jobs):
    """Start all calls at the same moment in threads. Return each call's result or error."""
    results, start = [None] * len(jobs), threading.Barrier(len(jobs))

    def work(i):
        start.wait(60)
        try:
            results[i] = jobs[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return results


def check(jobs):
    """Fail if a thread's result differs from its result without the others."""
    for job, got in zip(jobs, at_once([partial(train, *job) for job in jobs]), strict=True):
        if not isinstance(got, list):
            raise AssertionError(f"{job} failed, or did not end") from got
        for (loss, grad), (right_loss, right_grad) in zip(got, train(*job), strict=True):
            assert abs(loss - right_loss) < 1e-12, job
            torch.testing.assert_close(grad, right_grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("part", PARTS)
def test_two_threads_train_the_same_part(part):
    check([(part, seed) for seed in (0, 1)])


@pytest.mark.in_turn
def test_threads_that_simulate():
    """Simulations run one after the other. A model may be in two of them."""
    models = [
        nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
        for _ in range(2)
    ]
    x = torch.randn(2, 8, 16)
    for model in models:
        model(x).sum().backward()

    def state():
        attention = nn.functional.scaled_dot_product_attention
        gradients = [id(p.grad) for model in models for p in model.parameters()]
        return (
            nn.Module.__call__,
            attention,
            torch.UntypedStorage.resize_,
            gc.isenabled(),
            gradients,
        )

    def peaks(model):
        return [
            so.memory.simulate_step(model, x).peak_bytes,
            so.memory.simulate_step(model, x, device="h100").peak_bytes,
            so.memory.estimate(model, x).peak_bytes,
        ]

    before, right = state(), peaks(models[0])
    jobs = [partial(peaks, model) for model in (models[0], *models, models[1])]
    assert at_once(jobs) == [right] * 4
    assert state() == before


@pytest.mark.in_turn
def test_threads_that_are_the_first_to_call_anything():
    """Run them in a new process, where nothing is registered, planned or cached."""
    script = (
        "from tests import test_threads as t\n"
        "t.check([(part, seed) for part in t.PARTS for seed in (0, 1)])"
    )
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", script], check=True)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this CPython has a GIL"
)
def test_the_package_does_not_enable_the_gil():
    """CPython enables it, with a warning, for a module that does not declare support without it."""
    script = "import sys, storage_ops; storage_ops.info(); sys.exit(sys._is_gil_enabled())"
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", script], check=True)
