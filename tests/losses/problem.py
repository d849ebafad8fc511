"""Sequences with completions in four layouts, and their log-probabilities by sequence."""

import torch
from torch.nn import functional as F

D, E, V, S = 12, 7, 61, 6
FORMS = ["padded", "shifted", "packed", "packed and shifted"]
LENGTHS = [5, 9, 3, 7, 4, 8]


class Problem:
    """Hidden states of a policy and a reference, in the layout of a loss and by sequence."""

    def __init__(self, form, dtype=torch.float64):
        self.packed, self.shift = "packed" in form, "shifted" in form
        rows = sum(LENGTHS) if self.packed else S * 9
        shape = (1, rows) if self.packed else (S, 9)
        self.x = (torch.randn(*shape, D) * 0.7).to(dtype).requires_grad_()
        self.w = (torch.randn(V, D) * 0.5).to(dtype).requires_grad_()
        self.b = torch.randn(V).to(dtype).requires_grad_()
        self.ref = (torch.randn(*shape, E) * 0.7).to(dtype), (torch.randn(V, E) * 0.5).to(dtype)
        self.target = torch.randint(V, shape)
        self.bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
        spans = list(zip(self.bounds[:-1], self.bounds[1:], strict=True))
        self.parts = [(0, slice(*s)) if self.packed else (i, slice(0, 9)) for i, s in
                      enumerate(spans)]  # fmt: skip
        for row, span in self.parts:  # prompts, and padding
            self.target[row, span][: 1 + self.shift] = -100
            if not self.packed:
                self.target[row, LENGTHS[row] :] = -100
        self.options = {"shift": self.shift, "linear_bias": self.b}
        if self.packed:
            self.options["cu_seqlens"] = self.bounds.int()
            if form == "packed":
                self.x = self.x.detach()[0].requires_grad_()
                self.target, self.ref = self.target[0], (self.ref[0][0], self.ref[1])

    @property
    def leaves(self):
        return self.x, self.w, self.b

    def spread(self, values):
        """Return values of tokens, a list by sequence, in the shape of the log-probabilities."""
        count = self.target.shape[-1] - self.shift
        out = torch.zeros(*self.target.shape[:-1], count, dtype=torch.float64).view(-1, count)
        for (row, span), values_of_sequence in zip(self.parts, values, strict=True):
            places = torch.arange(self.target.shape[-1])[span]
            out[row, places[: len(values_of_sequence)]] = values_of_sequence
        return out.view(*self.target.shape[:-1], count)

    def tokens(self, ref=False, temperature=1.0):
        """Return log-probabilities, mask and entropies of the scored tokens of every sequence."""
        hidden, weight, bias = (*self.ref, None) if ref else (self.x, self.w, self.b)
        z = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        log_p = torch.log_softmax(z / temperature, -1).view(*self.target.shape, V)
        log_p, target = (t.unsqueeze(0) if self.target.dim() == 1 else t for t in
                         (log_p, self.target))  # fmt: skip
        result = []
        for row, span in self.parts:
            p, t = log_p[row, span], target[row, span]
            if self.shift:
                p, t = p[:-1], t[1:]
            mask = t != -100
            logp = torch.where(mask, p.gather(1, t.clamp_min(0)[:, None])[:, 0], 0)
            result.append((logp, mask, -(p.exp() * p).sum(1)))
        return result

    def sums(self, ref=False):
        return torch.stack([log_p.sum() for log_p, *_ in self.tokens(ref)])

    def counts(self):
        return torch.stack([mask.sum() for _, mask, _ in self.tokens()])

    def nll_of_chosen(self):
        chosen = self.tokens()[: S // 2]
        return -sum(log_p.sum() for log_p, *_ in chosen) / sum(mask.sum() for _, mask, _ in chosen)


def compare(problem, loss, expected):
    """Compare a loss and its gradients with a formula."""
    tight = problem.x.dtype == torch.float64
    close = {"rtol": 1e-9, "atol": 1e-11} if tight else {"rtol": 2e-4, "atol": 2e-5}
    torch.testing.assert_close(loss.double(), expected, **close)
    got = torch.autograd.grad(loss, problem.leaves)
    right = torch.autograd.grad(expected, problem.leaves, retain_graph=True)
    for ours, wanted in zip(got, right, strict=True):
        assert wanted.abs().max() > 0 or expected == 0  # 0 for a hinge loss within its margin
        torch.testing.assert_close(ours, wanted, **close)


def log_sigmoid(x):
    return -torch.log1p(torch.exp(-x))


def smoothed(h, e):
    return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)
