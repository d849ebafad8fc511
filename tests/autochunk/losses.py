"""Typical losses of hidden states x (4, 8, D), a weight w (V, D) and targets t (4, 8)."""

import functools
from unittest.mock import patch

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

from storage_ops.autochunk import backend
from storage_ops.autochunk.cross_entropy.recognise import NOTHING, recognise
from storage_ops.autochunk.runtime import chunk_op as chunks

B, T, D, V = 4, 8, 16, 320


def logits(x, w):
    return F.linear(x, w)


def flat(x, w):
    return logits(x, w).flatten(0, 1)


def log_probs(x, w, t):
    return torch.log_softmax(logits(x, w).float(), -1).gather(-1, t.clamp(min=0)[..., None])[..., 0]


def largest_fifth(values):
    """Return a mask of the largest fifth of all values."""
    if torch.__version__ < "2.12":  # Dynamo breaks the graph at a quantile
        least = values.flatten().topk(-(-values.numel() // 5))[0].min()
    else:
        least = torch.quantile(values, 0.8)
    return (values >= least).float()


def cross_entropy(x, w, t):
    return F.cross_entropy(flat(x, w).float(), t.flatten())


def cross_entropy_sum(x, w, t):
    return F.cross_entropy(flat(x, w), t.flatten().clamp(min=0), reduction="sum", ignore_index=0)


def biased(x, w, t):
    return F.cross_entropy(F.linear(x, w, w[:, 0]).flatten(0, 1), t.flatten())


def smoothed_weighted(x, w, t):
    weight = torch.linspace(0.5, 2, V)
    z = flat(x, w).float()
    return F.cross_entropy(z, t.flatten(), weight=weight, label_smoothing=0.1)


def soft_targets(x, w, t):
    q = torch.softmax(torch.linspace(-2, 2, B * T * V).view(B * T, V), -1)
    return F.cross_entropy(flat(x, w).float(), q, label_smoothing=0.05)


def softcap_scaled(x, w, t):
    z = 3 * torch.tanh(flat(x, w).float() * 0.7 / 3)
    return F.cross_entropy(z, t.flatten())


def z_loss_and_entropy(x, w, t):
    z = logits(x, w).float()
    p = torch.log_softmax(z, -1)
    bonus = -(p.exp() * p).sum(-1).mean()
    nll = F.nll_loss(p.flatten(0, 1), t.flatten())
    return nll + 1e-2 * torch.logsumexp(z, -1).square().mean() - 0.1 * bonus


def distillation(x, w, t):
    teacher = torch.log_softmax(logits(x.detach() * 0.5, w.detach() + 0.1).float() / 2, -1)
    student = torch.log_softmax(logits(x, w).float() / 2, -1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean") * 4


def dpo(x, w, t):
    chosen, rejected = log_probs(x, w, t).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def dpo_two_heads(x, w, t):
    difference = log_probs(x, w, t).sum(-1) - log_probs(x.flip(0) * 0.5, w, t).sum(-1)
    return -F.logsigmoid(0.1 * difference).mean()


def policy_ratio(x, w, t):
    now = log_probs(x, w, t)
    advantage = torch.linspace(-1, 1, B)[:, None]
    ratio = (now - now.detach() - 0.05).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def focal(x, w, t):
    p = log_probs(x, w, t)
    return -((1 - p.exp()) ** 2 * p).mean()


def softmax_sum(x, w, t):
    return torch.softmax(flat(x, w).float(), -1).square().sum()


def sigmoid_mean(x, w, t):
    return torch.sigmoid(logits(x, w).float()).mean()


def squared(x, w, t):
    return cross_entropy(x, w, t) ** 2


def shifted(x, w, t):
    z = logits(x, w)[:, :-1].float()
    return F.cross_entropy(z.reshape(-1, V), t[:, 1:].reshape(-1))


def heads(x, w, t):
    z = torch.bmm(x.view(2, -1, D), w.view(2, V // 2, D).transpose(1, 2)).float()
    return torch.logsumexp(z, -1).square().mean()


def router(x, w, t):
    p = torch.softmax(flat(x, w).float(), -1)
    best, chosen = p.topk(2, -1)
    return (best / best.sum(-1, keepdim=True) * chosen).mean() + p.mean(0).square().sum() * V


LOSSES = [
    cross_entropy, cross_entropy_sum, biased, smoothed_weighted, soft_targets, softcap_scaled,
    z_loss_and_entropy, distillation, dpo, dpo_two_heads, policy_ratio, focal, softmax_sum,
    sigmoid_mean, squared, shifted, heads, router,
]  # fmt: skip


def arguments(dtype=torch.float32):
    x = torch.randn(B, T, D).to(dtype).requires_grad_()
    w = (torch.randn(V, D) * 0.5).to(dtype).requires_grad_()
    t = torch.randint(V, (B, T))
    t[0, :2] = -100
    return x, w, t


def run(f, x, w, t):
    """Return loss and gradients."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    loss = f(x, w, t)
    loss.backward()
    return loss.detach(), x.grad, w.grad


def weighted(f, x, w, t):
    """Return the results of `f`, and the gradients of their sum with different weights."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = f(x, w, t)
    outs = out if isinstance(out, tuple) else (out,)
    wanted = [o for o in outs if o.requires_grad]
    sum((o * torch.linspace(0.5, 1, o.numel()).view(o.shape)).sum() for o in wanted).backward()
    return *(o.detach() for o in outs), x.grad, w.grad


def interpreted(
    f, num_chunks=4, strict=True, dynamic=False, reports=None, ops=None, memory_budget=None
):
    """Compile `f` with the backend's pass, but run it op by op, so that a test takes a second.

    Patches stay until the test ends, because a chunk of the backward is compiled when it runs.

    Appends a report of each graph to `reports`, and the names of its ops to `ops`.
    """

    recognised = NOTHING

    def partition(joint, inputs, **options):
        report = backend.apply(joint.graph, num_chunks, memory_budget, strict, None, recognised)
        if reports is not None:
            reports.append(report)
        if ops is not None:
            names = [str(n.target) for n in joint.graph.nodes]
            ops.extend(name for name in names if "storage_ops" in name)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def compiler(gm, inputs):
        nonlocal recognised
        recognised = recognise(gm, num_chunks, memory_budget)
        return aot_autograd(
            fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward),
            partition_fn=partition,
            decompositions=select_decomp_table,
        )(gm, inputs)

    chunks.body_of.cache_clear()
    compiled = torch.compile(f, backend=compiler, dynamic=dynamic)
    body_compiler = functools.partial(torch.compile, backend="eager")
    patch.object(chunks.torch, "compile", body_compiler).start()
    return compiled
