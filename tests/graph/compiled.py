"""Graphs of torch.compile, and the results of torch's own recomputing pass on them."""

import contextlib
import operator
import warnings

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func

from storage_ops import graph
from storage_ops.graph.nodes import compute_value, copy_of, fake_modes

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
# torch 2.11 also traces autograd, but does not tag random ops and later backward passes.
TRACES_GRAD = hasattr(torch._dynamo.config, "trace_autograd_ops") and VERSION >= (2, 12)
torch_pass = None
if TRACES_GRAD and VERSION >= (2, 13):
    # Earlier versions recognise backward passes differently.
    from torch._functorch._activation_checkpointing import (
        remat_using_tags_for_fwd_loss_bwd_graph_pass as torch_pass,
    )


@contextlib.contextmanager
def whole_steps():
    """Let torch.compile trace steps that call autograd, without torch's own recomputing pass."""
    ours = {"remat_using_tags_for_fwd_loss_bwd_graph": False}
    known = {k: v for k, v in ours.items() if hasattr(functorch_config, k)}
    with torch._dynamo.config.patch(trace_autograd_ops=True), functorch_config.patch(known):
        yield


def compiled(step, *args, rewrite=graph.remat, dynamic=None):
    """Rewrite the one graph of a step and run it. Return results and the generator's state."""
    graphs = []

    def compile_graph(gm, _):
        graphs.append(gm)
        return rewrite(gm)

    with whole_steps():
        fn = torch.compile(
            step, backend=aot_autograd(fw_compiler=compile_graph), fullgraph=True, dynamic=dynamic
        )
        torch.manual_seed(0)
        results = fn(*args), torch.get_rng_state()
    (gm,) = graphs
    return gm, results


def graph_of(step, *args):
    return compiled(step, *args, rewrite=lambda gm: gm)[0]


def check_against_eager(step, *args, dynamic=None):
    """Check that the rewritten step gives the bits of eager mode. Return both graphs."""
    rewritten = []

    def rewrite(gm):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            rewritten.append(graph.remat(gm, verify=True))
        return rewritten[0]

    before, results = compiled(step, *args, rewrite=rewrite, dynamic=dynamic)
    torch.manual_seed(0)
    torch.testing.assert_close(results, (step(*args), torch.get_rng_state()), rtol=0, atol=0)
    return before, rewritten[0]


def boxed(gm, _):
    return make_boxed_func(gm)


def joint_of(fn, *args):
    """Return the joint graph of a function."""
    joint = []

    def partition(gm, inputs, **options):
        joint.append(copy_of(gm))
        return partitioners.default_partition(gm, inputs, **options)

    backend = aot_autograd(fw_compiler=boxed, partition_fn=partition)
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return joint[0]


def shape_of(gm):
    """Return the calls of a graph in order, with their arguments, without getitem."""
    known, calls = {}, []
    for node in gm.graph.nodes:
        args = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        inner = node.name if node.op == "placeholder" else None
        if node.target is operator.getitem:
            known[node] = f"{known[node.args[0]]}[{node.args[1]}]"
            continue
        known[node] = f"%{len(calls)}"
        target = node.target if node.op == "call_function" else node.op
        calls.append(f"{target} {inner} {args}")
    return calls


def by_torch(gm):
    """Return the result of torch's own pass on a copy of a graph."""
    after = torch_pass.remat_using_tags_for_fwd_loss_bwd_graph(copy_of(gm))
    (mode,) = fake_modes(after.graph)
    for node in after.graph.nodes:
        if node.op == "call_function":
            compute_value(node, mode)
    return after


def check_against_torch(gm, after):
    expected = by_torch(gm)
    assert shape_of(after) == shape_of(expected)
    assert graph.schedule(after).peak_bytes <= graph.schedule(expected).peak_bytes
