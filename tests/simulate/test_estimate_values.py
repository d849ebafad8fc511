"""Sizes and branches that depend on values are known, assumed or refused."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops.memory import estimate

SPARSE = torch.eye(3).to_sparse()


class MoE(nn.Module):
    """A layer of experts, two for each token, with several common ways to dispatch tokens."""

    def __init__(self, way, width=32, experts=8, device=None):
        super().__init__()
        self.way, self.n = way, experts
        self.gate = nn.Linear(width, experts, bias=False, device=device)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, device=device), nn.SiLU(),
                nn.Linear(4 * width, width, device=device),
            )
            for _ in range(experts)
        )  # fmt: skip

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        return getattr(self, self.way)(x, weights, chosen, torch.zeros_like(x))

    def one_hot(self, x, weights, chosen, y):
        mask = F.one_hot(chosen, self.n).permute(2, 1, 0)
        for i in mask.sum((-1, -2)).gt(0).nonzero():
            slot, token = torch.where(mask[i].squeeze(0))
            y.index_add_(0, token, self.experts[int(i)](x[token]) * weights[token, slot, None])
        return y

    def counts_first(self, x, weights, chosen, y):
        counts = torch.bincount(chosen.flatten(), minlength=self.n).tolist()
        for i, expert in enumerate(self.experts):
            if counts[i]:
                token, slot = torch.where(chosen == i)
                y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y

    def sorted(self, x, weights, chosen, y):
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token, counts = order // 2, F.one_hot(flat, self.n).sum(0)
        parts = x[token].split(counts.tolist())
        out = torch.cat([self.experts[i](part) for i, part in enumerate(parts)])
        return y.index_add(0, token, out * weights.flatten()[order, None])

    def masks(self, x, weights, chosen, y):
        for i, expert in enumerate(self.experts):
            hit = (chosen == i).any(-1)
            y[hit] = y[hit] + expert(x[hit])
        return y

    def unique(self, x, weights, chosen, y):
        ids, counts = torch.unique(chosen, return_counts=True)
        ends = counts.cumsum(0)
        order, start = chosen.flatten().argsort(), 0
        for j in range(len(ids)):
            token = order[start : int(ends[j])] // 2
            y = y.index_add(0, token, self.experts[int(ids[j])](x[token]))
            start = int(ends[j])
        return y


WAYS = ("one_hot", "counts_first", "sorted", "masks", "unique")


@pytest.mark.in_turn
@pytest.mark.parametrize("way", WAYS)
def test_experts_take_the_measured_memory(way):
    """The real router gets the assumed choices: balanced, and with one overloaded expert."""
    tokens = 8 * int(torch.randint(16, 24, ()))
    model, x = MoE(way), torch.randn(tokens, 32)
    chosen = []

    def fixed(t, k, dim):
        return t.gather(-1, chosen[-1]), chosen[-1]

    def step():
        model(x).square().sum().backward()

    for share in (1 / 8, 0.3):
        read = []
        estimate(lambda read=read: read.extend((x @ x.T[:, :8]).topk(2)[1].tolist()), assume=share)
        chosen.append(torch.tensor(read))
        counts = torch.bincount(chosen[-1].flatten(), minlength=8)
        assert counts[0] == counts.max() == round(share * 2 * tokens)
        assert counts[1:].max() - counts[1:].min() <= 1
        assert (chosen[-1][:, 0] != chosen[-1][:, 1]).all()
        model.zero_grad()
        e = estimate(step, assume={"topk": share})
        with pytest.MonkeyPatch.context() as patch, so.memory.measure() as m:
            patch.setattr(torch.Tensor, "topk", fixed)
            step()
        slack = 1024 * len(e.at_peak) + 64 * tokens  # the measured run has no ids of choices
        assert abs(e.peak_bytes - e.input_bytes - m.peak_bytes) < slack
        assert abs(e.kept_bytes - e.input_bytes - m.kept_bytes) < slack
    on_meta = MoE(way, device="meta")
    other = estimate(lambda: on_meta(x.to("meta")).square().sum().backward(), assume=share)
    assert other.peak_bytes - x.nbytes == pytest.approx(e.peak_bytes, abs=slack)


@pytest.mark.parametrize("way", WAYS)
def test_experts_without_an_assumption(way):
    with pytest.raises(RuntimeError) as error:
        estimate(MoE(way), torch.randn(16, 32))
    assert "the simulated code needs the values of a tensor, which depend on topk at" in str(
        error.value
    )
    assert "weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)" in str(error.value)
    assert "Pass assume={'topk': the share of its choices" in str(error.value)


def test_a_recomputed_layer_has_the_same_choices():
    model, x = MoE("sorted"), torch.randn(64, 32, requires_grad=True)

    def step():
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()

    assert estimate(step, assume=0.25).kept_bytes > 0


def test_conditions_are_true_for_the_assumed_share():
    x = torch.randn(64, 64)
    size = x.nbytes
    for fn in (
        lambda: x[x > 0],
        lambda: torch.masked_select(x, x.lt(0)),
        lambda: x[x[:, 0] > 0],
        lambda: x[torch.where(x[:, 0] > 0)],
        lambda: x[:, x[:, 0] > 0],
        lambda: x.repeat_interleave((x[:, 0] > 0).long(), dim=0),
        lambda: x.split([int((x[:, 0] > 0).sum()), 48])[0].clone(),
    ):
        e = estimate(fn, assume=0.25)
        assert e.kept_bytes - e.input_bytes == size // 4
    e = estimate(lambda: x[x > 0], assume={"gt": 1000})
    assert e.kept_bytes - e.input_bytes == 4096  # 1000 numbers, rounded
    # Positions of True are not aligned with rows or columns.
    counts = []
    estimate(lambda: counts.extend((x > 0).sum(0).tolist()), assume=1 / 64)
    assert sum(counts) == 64 and max(counts) < 10
    assert estimate(lambda: x[x > 0], assume=0).kept_bytes == size


def test_branches():
    x, y = torch.randn(1024), torch.randn(1024, requires_grad=True)

    def branch():
        return torch.cat([x, x]) if x.sum() > 0 else x + 1

    def cond():
        return torch.cond(y.sum() > 0, lambda y: y.sin() * y.cos(), lambda y: y - 1, (y,))

    sizes = [estimate(branch, assume=share).kept_bytes for share in (0.0, 1.0)]
    assert sizes == [2 * x.nbytes, 3 * x.nbytes]
    assert [estimate(cond, assume=share).kept_bytes for share in (0.0, 1.0)] == [8192, 4 * 4096]
    assert estimate(lambda: torch.cond(torch.tensor(False), branch, lambda: x, ())).peak_bytes
    torch.testing.assert_close(
        cond(), y.sin() * y.cos() if y.sum() > 0 else y - 1
    )  # torch's own function is restored


def test_sizes_of_ops_without_a_condition():
    x = torch.randn(64, 64)
    long = 8 * 4096
    for fn, nbytes in (
        (lambda: x.nonzero(), 2 * long // 4),
        (lambda: torch.unique(x), x.nbytes // 4),
        (lambda: torch.unique(x, return_inverse=True)[1], long),
        (lambda: torch.unique(x, dim=1), x.nbytes // 4),
        (lambda: torch.unique_consecutive(x), x.nbytes // 4),
    ):
        e = estimate(fn, assume=0.25)
        assert e.kept_bytes - e.input_bytes == nbytes
    for fn, key in (
        (lambda: x.repeat_interleave(x[:, 0].long(), dim=0), "repeat_interleave"),
        (lambda: torch.bincount(x[:, 0].long()), "bincount"),
    ):
        with pytest.raises(RuntimeError, match=rf"Pass assume=\{{'{key}': how many elements"):
            estimate(fn, assume=0.25)
        assert estimate(fn, assume={key: 512}).kept_bytes > x.nbytes


def test_known_values_need_no_assumption():
    lengths, mask = torch.tensor([3, 5, 8]), torch.rand(64) > 0.5
    x, ids = torch.randn(64, 64), torch.randint(0, 9, (512,))
    weight = nn.Parameter(torch.randn(64))
    n = int(mask.sum())

    def known():
        ends = F.pad(lengths.cumsum(0), (1, 0))
        longest = (ends[1:] - ends[:-1]).max().item()
        assert ends.tolist() == [0, 3, 8, 16] and longest == 8
        assert len(torch.unique(ids)) == len(torch.bincount(ids).nonzero()) <= 9
        rows = x[mask & ~torch.zeros_like(mask)]
        assert rows.shape == (n, 64)
        counts = torch.zeros(2, dtype=torch.long)
        counts[1] += lengths.sum()
        view = counts[1:]
        view.mul_(2)
        assert counts.tolist() == [0, 32]
        assert sorted(torch.randperm(5).tolist()) == [0, 1, 2, 3, 4]
        lengths.add_(1)
        assert (lengths + 0).tolist() == [4, 6, 9]
        counts[0] = (x @ weight.detach()).sum().long()
        return counts

    state = torch.get_rng_state()
    estimate(known)
    assert lengths.tolist() == [3, 5, 8] and torch.equal(state, torch.get_rng_state())
    with pytest.raises(RuntimeError, match=r"item at .*tolist"):
        estimate(lambda: known().tolist())


def test_numbers_are_finite():
    x = torch.randn(64, 64)
    assert estimate(lambda: x + 1 if torch.isfinite(x).all() else None).kept_bytes == 2 * x.nbytes
    assert estimate(lambda: x + 1 if x.sum().isnan() else None).kept_bytes == x.nbytes
    assert estimate(lambda: x + 1 if torch.isinf(x).any() else None).kept_bytes == x.nbytes
    p = nn.Parameter(x)

    def clip():
        (p * 2).sum().backward()
        nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)

    assert estimate(clip).kept_bytes == 2 * x.nbytes


def test_an_assumed_number_that_is_read():
    x = torch.randn(64, 64)
    assert estimate(lambda: x.new_empty(x.sum().int()), assume={"item": 128}).peak_bytes > x.nbytes
    seen = []
    estimate(lambda: seen.extend([x.sum().item(), bool(x.max())]), assume={"item": 3})
    assert seen == [3.0, True] and isinstance(seen[0], float)
    assert estimate(lambda: x + 1 if torch.equal(x, x) else 0, assume={"item": 0}).peak_bytes
    x = nn.Parameter(x)
    for read in (lambda: x.sum().item(), lambda: float(x.max()), lambda: torch.equal(x, x + 1)):
        with pytest.raises(RuntimeError, match=r"Pass assume=\{'item': the number that is read}"):
            estimate(read)


def recurrent(x):
    """Fail as nn.LSTM does for fake tensors of a GPU."""
    raise RuntimeError(
        'Attempted to set the storage of a tensor on device "meta" to a storage on "cuda:0".'
    )


@pytest.mark.parametrize(
    ("fn", "does"),
    [
        (recurrent, "runs a recurrent layer of cuDNN, or sets a storage,"),
        (lambda x: torch.tensor_split(x, x[:2, 0].long()), "reads the bytes of a tensor"),
        (lambda x: (x + 1).numpy(), "reads the bytes of a tensor"),
        (lambda x: f"{(x + 1).sum():.2f}", "prints the value of a tensor"),
        (lambda x: x.to_sparse(), "calls _to_sparse"),
        (lambda x: torch.relu(SPARSE), "calls relu with a sparse tensor"),
    ],
)
def test_errors_of_unsupported_ops_name_the_line(fn, does):
    with pytest.raises(RuntimeError, match=rf"simulated code {does}.*test_estimate_values\.py:"):
        estimate(fn, torch.randn(64, 64))


@pytest.mark.parametrize(
    ("assume", "error", "message"),
    [
        pytest.param(True, TypeError, "`assume` is True. Expected a share", id="bool"),
        pytest.param("x", TypeError, "`assume` is 'x'. Expected a share", id="text"),
        pytest.param(1.5, ValueError, "`assume` is 1.5. Expected a share", id="above 1"),
        pytest.param(-1, ValueError, "`assume` is -1. Expected a share", id="negative"),
        pytest.param(float("nan"), ValueError, "`assume` is nan", id="nan"),
        pytest.param({"topk": 2.0}, ValueError, r"`assume\['topk'\]` is 2.0", id="share above 1"),
        pytest.param(
            {"item": "x"},
            TypeError,
            r"`assume\['item'\]` is 'x'. Expected a number",
            id="text for item",
        ),
        pytest.param(
            {"top_k": 0.5},
            ValueError,
            "`assume` has the key 'top_k'. Expected the name of an op",
            id="unknown op",
        ),
        pytest.param(
            {"gt": 65},
            ValueError,
            "`assume` says 65 elements for gt at .*. Expected at most the 64",
            id="more than all elements",
        ),
    ],
)
def test_wrong_assumptions(assume, error, message):
    x = torch.randn(64)
    with pytest.raises(error, match=f"estimate: {message}"):
        estimate(lambda: x[x > 0], assume=assume)
    assert gc.isenabled()


@pytest.mark.parametrize(
    "make",
    [
        lambda data, like: torch.tensor(data, device=like.device),
        lambda data, like: torch.as_tensor(data, device=like.device),
        lambda data, like: like.new_tensor(data, dtype=torch.int64),
    ],
    ids=["tensor", "as_tensor", "new_tensor"],
)
def test_numbers_on_the_meta_device_are_known(make):
    """Their values determine the size of the output."""
    run = estimate(
        lambda like: torch.empty(make([1024], like).expand(2).tolist(), device=like.device),
        torch.empty(3, device="meta"),
    )
    assert run.kept_bytes - run.input_bytes >= 4 * 1024**2


@pytest.mark.parametrize("create", [torch.tensor, torch.as_tensor])
def test_lists_of_tensors_become_tensors(create):
    lengths = torch.randint(1, 200, (2, 3), dtype=torch.int32)

    def padded(lengths, width=256):
        last = create([[row.max(), row.min()] for row in lengths])
        assert last.dtype == torch.int32
        return torch.ones(int(last.amax()), width).sum(0)

    e = estimate(padded, lengths)
    with so.memory.measure() as m:
        padded(lengths)
    slack = 512 * (len(e.at_peak) + 8)
    assert abs(e.peak_bytes - e.input_bytes - m.peak_bytes) < slack
    with pytest.raises(RuntimeError, match="which depend on argmax"):
        estimate(lambda x: create([x.argmax()]), torch.empty(4, device="meta"))
