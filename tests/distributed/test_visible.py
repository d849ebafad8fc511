"""Traces and CommDebugMode show the collectives of a sliced vocabulary."""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import storage_ops as so
from storage_ops import graph, matmul
from storage_ops.loss.planning import planner
from storage_ops.loss.planning.problem import Problem

from ..ranks import run_on_ranks

if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)
WORLD, TOKENS, HIDDEN, PART = 2, 40, 16, 50
BUDGET = 20_000  # chunks of tokens
FUNCOL = torch.ops._c10d_functional
COLLECTIVES = {
    FUNCOL.all_reduce.default, FUNCOL.all_gather_into_tensor.default,
    FUNCOL.reduce_scatter_tensor.default,
}  # fmt: skip
OPTIONS = [
    {"memory_budget": BUDGET},
    {},
    {"memory_budget": BUDGET, "input_grad": "partial", "label_smoothing": 0.1},
    {"memory_budget": 40_000, "input_grad": "reduce_scatter"},
    {"reduction": "none", "memory_budget": BUDGET, "softcap": 3.0},
    {"returns": ("loss", "lse", "argmax"), "memory_budget": BUDGET},
    {"returns": ("loss", "topk"), "top_k": 3},
]


def arguments(options, dtype=torch.float64, part=PART, tokens=TOKENS):
    target = torch.randint(WORLD * PART, (tokens,))
    target[5] = -100
    x, w = torch.randn(tokens, HIDDEN, dtype=dtype), torch.randn(part, HIDDEN, dtype=dtype)
    if options.get("input_grad") == "reduce_scatter":
        x = x.chunk(WORLD)[dist.get_rank()].clone()
    return x.requires_grad_(), w.requires_grad_(), target


def step(loss):
    """Return a function that returns results and gradients."""

    def run(x, w, target):
        results = tree_leaves(loss(x, w, target))
        total = sum(part.sum() for part in results if part.is_floating_point())
        return (*results, *torch.autograd.grad(total, (x, w)))

    return run


def loss_with(options):
    def loss(x, w, target):
        return so.linear_cross_entropy(x, w, target, process_group=dist.group.WORLD, **options)

    return loss


def names(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def traces(rank):
    for options in OPTIONS:
        run = step(loss_with(options))
        args = arguments(options)
        right = run(*args)
        for mode in ("real", "fake"):
            gm = make_fx(run, tracing_mode=mode)(*args)
            assert COLLECTIVES & set(names(gm))
            assert not any("linear_cross_entropy" in str(name) for name in names(gm))
            other = arguments(options)
            with torch.no_grad():  # the graph includes the backward
                results, repeated = gm(*other), gm(*args)
            torch.testing.assert_close(results, run(*other))
            torch.testing.assert_close(repeated, right)


def order(rank):
    """A chunk sends its maxima, and later its sums, while the next chunk runs its products."""
    p = Problem(3 * TOKENS, HIDDEN, PART, matmul.of(torch.float32, "cpu", 1), several=True)
    plan = planner.make(planner.schedule_of(p, f"token-chunked {TOKENS} {PART}"))
    assert planner.schedule_of(p, plan.key).tiles == 2
    args = arguments({}, torch.float32, tokens=3 * TOKENS)
    gm = make_fx(step(loss_with({"plan": plan})), tracing_mode="fake")(*args)
    product = torch.ops.storage_ops._product.default
    hidden, chunks = [], 0
    for node in gm.graph.nodes:
        if node.target is FUNCOL.all_reduce.default and node.meta["val"].dim():  # not the loss
            (wait,) = [user for user in node.users if user.target is FUNCOL.wait_tensor.default]
            between, at = 0, node
            while at is not wait:
                at = at.next
                between += at.target is product
            hidden.append(between)
            chunks += node.args[1] == "max"
    assert chunks == 3
    # Each chunk has three all-reduces: maxima, sums and gradient. Few of them hide no product.
    assert len(hidden) == 3 * chunks and hidden.count(0) <= 3, hidden


def counts(rank):
    from torch.distributed.tensor.debug import CommDebugMode

    for options in OPTIONS:
        run, args = step(loss_with(options)), arguments(options)
        right = run(*args)
        with CommDebugMode() as seen:
            ours = run(*args)
        torch.testing.assert_close(ours, right, rtol=0, atol=0)
        kinds = {str(op).split(".")[-1]: n for op, n in seen.get_comm_counts().items()}
        assert kinds["all_reduce"] >= 2, kinds
        assert seen.get_total_counts() > 2


def compiled(rank):
    """Compile slices of different sizes, twice. Inductor was wrong when the call was in pieces."""
    for extra in (0, 7):
        torch._dynamo.reset()
        loss = loss_with({"memory_budget": BUDGET})
        run = step(torch.compile(loss, fullgraph=True))
        for seed in (1, 2):
            torch.manual_seed(seed)
            args = arguments({}, torch.float32, part=PART + extra * (1 - 2 * rank))
            torch.testing.assert_close(run(*args), step(loss)(*args))


def steps(rank):
    for is_checkpointed in (False, True):
        loss, (x, w, target) = loss_with({"memory_budget": BUDGET}), arguments({})

        def train(x, w, target, loss=loss, is_checkpointed=is_checkpointed):
            if is_checkpointed:
                value = torch.utils.checkpoint.checkpoint(loss, x, w, target, use_reentrant=False)
            else:
                value = loss(x, w, target)
            value.backward()
            return value.detach()

        right = train(x, w, target)
        grads, x.grad, w.grad = (x.grad, w.grad), None, None
        traced = graph.trace_step(train, x, w, target)
        torch.testing.assert_close(traced(x, w, target), right)
        torch.testing.assert_close((x.grad, w.grad), grads)
        assert (FUNCOL.all_reduce.default in names(traced.gm)) == (not is_checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize("work", [traces, order, counts, compiled, steps])
def test_ranks(work):
    run_on_ranks(work, WORLD)
