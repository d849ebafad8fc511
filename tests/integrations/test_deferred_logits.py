"""Operations that a model and a loss can apply to deferred logits, and those that are refused."""

import functools
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops
from storage_ops.integrations import head_loss

D, V = 8, 19


class Toy(nn.Module):
    """A model like those of transformers. `head` changes its logits, `loss` is its loss."""

    def __init__(self, head=None, loss=None, bias=False):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.out = nn.Linear(D, V, bias=bias)
        self.head, self.loss = head or (lambda logits: logits), loss or flat_loss

    def get_output_embeddings(self):
        return self.out

    def forward(self, ids, labels=None):
        logits = self.head(self.out(self.embed(ids)))
        loss = None if labels is None else self.loss(logits, labels)
        return {"loss": loss, "logits": logits}


def flat_loss(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), **options)


def sliced_loss(logits, labels):
    logits = logits[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels[..., 1:].reshape(-1))


BIAS = torch.linspace(-1, 1, V)
HEADS = {
    "scaled": lambda x: 3 * x * 0.25 / 0.5,
    "capped": lambda x: torch.tanh(x / 2.0) * 2.0,
    "scaled and capped": lambda x: F.tanh(x.float() * 1.5) * 4.0 / 3.0,
    "capped with another cap": lambda x: (x / 2.0).tanh() * 7.0,
    "divided by a tensor": lambda x: 2 * x / torch.full((), 3.0),
    "scaled by class": lambda x: torch.arange(1.0, V + 1) * torch.tanh(x + BIAS) * 0.5,
    "scaled by class and capped": lambda x: torch.tanh(x * BIAS / 0.5) * 3,
    "log-probabilities": lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32),
    "exchanged": lambda x: x.transpose(0, 1).contiguous().transpose(1, 0).contiguous(),
    "indexed": lambda x: x.view(-1, 1, 5, V)[:, 0],
    "same dtype and device": lambda x: x.to(x.device).to(torch.float32, non_blocking=True),
}
LOSSES = {
    "negative log-likelihood": lambda x, t: F.nll_loss(
        F.log_softmax(x.view(-1, V), dim=-1), t.view(-1), torch.arange(1.0, V + 1), reduction="sum"
    ),
    "sliced": sliced_loss,
    "sliced in one dimension": lambda x, t: flat_loss(x[:, 1:].contiguous(), t[:, :-1].reshape(-1)),
    "sum": lambda x, t: flat_loss(x, t, reduction="sum") / 7,
    "none": lambda x, t: flat_loss(x, t, reduction="none").view(t.shape).sum(1).square().mean(),
    "class weights": lambda x, t: flat_loss(x, t, weight=torch.arange(1.0, V + 1)),
    "smoothed": lambda x, t: flat_loss(x, t, label_smoothing=0.1),
    "ignored": lambda x, t: flat_loss(x, t, ignore_index=3),
    "distributions": lambda x, t: F.cross_entropy(
        x.reshape(-1, V), F.one_hot(t, V).view(-1, V) * 0.5
    ),
    "added in place": lambda x, t: flat_loss(x, t).add_(1.0),
    "two losses": lambda x, t: flat_loss(x, t) + 0.5 * sliced_loss(x, t),
    "the shape": lambda x, t: flat_loss(x, t) * x.shape[-1] * x.dim() * x.size()[0] / x.ndim,
}
CASES = [
    *(pytest.param(head, None, id=name) for name, head in HEADS.items()),
    *(pytest.param(None, loss, id=name) for name, loss in LOSSES.items()),
]


def check_against_plain(model, run, rtol=1e-5):
    """Check that the patched model has the loss and gradients of the plain one."""
    expected = run(model)["loss"]
    expected.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with storage_ops.patch_causal_lm(model):
        outputs = run(model)
        outputs["loss"].backward()
    assert outputs["logits"] is None
    assert outputs["loss"].dtype == expected.dtype
    torch.testing.assert_close(outputs["loss"], expected, rtol=rtol, atol=1e-6)
    for name, p in model.named_parameters():
        atol = 1e-6 * max(1.0, grads[name].abs().max().item())
        torch.testing.assert_close(p.grad, grads[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_pieces_of_tokens(name, monkeypatch):
    monkeypatch.setattr(head_loss, "piece_rows", lambda *sizes: 4)
    scale, ids = nn.Parameter(torch.rand(V) + 0.5), torch.randint(V, (3, 5))
    scale.grad = None
    model = Toy(lambda x: x * scale, LOSSES[name], bias=True)
    model.scale = scale
    check_against_plain(model, lambda model: model(ids, labels=ids))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("head", "loss"), CASES)
def test_loss_and_gradients(head, loss, bias):
    ids = torch.randint(V, (3, 5))
    check_against_plain(Toy(head, loss, bias), lambda model: model(ids, labels=ids))


# Dynamo breaks the graph at F.tanh and at an nn.CrossEntropyLoss created in the forward.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "fullgraph"),
    [("scaled", True), ("capped", True), ("capped with another cap", True),
     ("scaled by class", False), ("scaled and capped", False)],
)  # fmt: skip
def test_compiled(head, fullgraph):
    ids = torch.randint(V, (3, 5))
    torch._dynamo.reset()

    def run(model):
        patched = type(model) is not Toy
        step = torch.compile(model, backend="aot_eager", fullgraph=fullgraph) if patched else model
        return step(ids, labels=ids)

    check_against_plain(Toy(HEADS[head], None if fullgraph else sliced_loss), run)


def test_transforms_of_torch_func():
    """Of a loss of returned logits."""
    model, ids = Toy(), torch.randint(V, (2, 5))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, ids):
        logits = torch.func.functional_call(model, parameters, (ids,))["logits"]
        return sliced_loss(logits, ids)

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    expected = torch.func.grad(loss)(parameters, ids), per_sample(parameters, ids[:, None])
    with storage_ops.patch_causal_lm(model, logits="deferred"):
        found = torch.func.grad(loss)(parameters, ids), per_sample(parameters, ids[:, None])
    torch.testing.assert_close(found, expected)


def test_a_graph_break_between_output_layer_and_loss():
    def head(logits):
        torch._dynamo.graph_break()
        return torch.tanh(logits)

    ids = torch.randint(V, (3, 5))
    torch._dynamo.reset()
    model = Toy(head)
    expected = model(ids, labels=ids)["loss"]
    storage_ops.patch_causal_lm(model)
    outputs = torch.compile(model, backend="aot_eager")(ids, labels=ids)
    torch.testing.assert_close(outputs["loss"], expected)
    assert outputs["logits"] is None


def test_float64_logits_cast_to_float32_have_a_float32_loss():
    ids = torch.randint(V, (3, 5))
    model = Toy(lambda x: x.float()).double()
    check_against_plain(model, lambda model: model(ids, labels=ids))
    check_against_plain(Toy().double(), lambda model: model(ids, labels=ids))


def test_autocast():
    ids = torch.randint(V, (3, 5))

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, labels=ids)

    check_against_plain(Toy(), run, rtol=0.05)


REFUSED_HEADS = {
    "operator +": lambda x: x + 1,
    "operator -": lambda x: 1 - x,
    "'relu'": torch.relu,
    "'softmax'": lambda x: F.softmax(x, -1),
    "multiplication by a Tensor": lambda x: x * torch.ones(5, 1),
    "multiplication after log_softmax": lambda x: x.log_softmax(-1) * 2,
    "log_softmax in dimension 1": lambda x: x.log_softmax(1),
    "transpose(1, 2)": lambda x: x.transpose(1, 2),
    "second tanh": lambda x: torch.tanh(torch.tanh(x)),
    "the index": lambda x: x[..., :5],
    "the index (": lambda x: x[:, :, 1:],
    "the index tensor": lambda x: x[torch.ones(3, dtype=torch.long)],
    "to('meta')": lambda x: x.to("meta"),
    "breaks up its 19 classes": lambda x: x.view(-1, V - 1),
    "stack": lambda x: torch.stack([x, x]),
}


@pytest.mark.parametrize("words", REFUSED_HEADS)
def test_unknown_operations_are_refused_by_name(words):
    ids = torch.randint(V, (3, 5))
    model = Toy(REFUSED_HEADS[words])
    storage_ops.patch_causal_lm(model)
    with pytest.raises(NotImplementedError) as caught:
        model(ids, labels=ids)
    assert words in str(caught.value)
    assert words == "stack" or "Toy" in str(caught.value)
    # The failed call leaves no state: inference works, and the plain loss after unpatching.
    if words not in ("to('meta')", "breaks up its 19 classes"):
        assert isinstance(model(ids)["logits"], torch.Tensor)


REFUSED_LOSSES = {
    "nll_loss": lambda x, t: F.nll_loss(x.view(-1, V), t.view(-1)),
    "a sum of logits": lambda x, t: flat_loss(x, t) + x.sum(-1).mean(),
    "dimensions": lambda x, t: F.cross_entropy(x, t),
    "size_average": lambda x, t: flat_loss(x, t, size_average=False),
    "without a cross-entropy": lambda x, t: torch.zeros((), requires_grad=True),
}


@pytest.mark.parametrize("words", REFUSED_LOSSES)
def test_another_loss_is_refused(words):
    ids = torch.randint(V, (3, 5))
    model = Toy(loss=REFUSED_LOSSES[words])
    storage_ops.patch_causal_lm(model)
    with pytest.raises(NotImplementedError, match=words) as caught:
        model(ids, labels=ids)
    assert "Toy" in str(caught.value) and "unpatch_causal_lm" in str(caught.value)


def test_a_model_that_does_not_call_its_output_layer_is_refused():
    class Other(Toy):
        def forward(self, ids, labels=None):
            logits = F.linear(self.embed(ids), self.out.weight)
            return {"loss": flat_loss(logits, labels), "logits": logits}

    ids = torch.randint(V, (3, 5))
    model = Other()
    storage_ops.patch_causal_lm(model)
    with pytest.raises(NotImplementedError, match="Other with labels ended without get_output"):
        model(ids, labels=ids)


def test_python_can_inspect_deferred_logits():
    def head(logits):
        assert isinstance(logits, torch.Tensor) or (
            not hasattr(logits, "__array__") and "DeferredLogits" in repr(logits)
        )
        return logits

    ids = torch.randint(V, (3, 5))
    check_against_plain(Toy(head), lambda model: model(ids, labels=ids))


# Losses of a caller. z are the logits that the model returned, t the targets.
def smoothed(z, t):
    """Return a smoothed loss as LabelSmoother of transformers does, with in-place writes."""
    loss = -F.log_softmax(z, dim=-1)
    t = t.unsqueeze(-1)
    ignored = t.eq(3)
    nll, spread = loss.gather(-1, t), loss.sum(dim=-1, keepdim=True, dtype=torch.float32)
    for term in (nll, spread):
        term.masked_fill_(ignored, 0.0)
    return nll.sum() * 0.9 + spread.sum() * 0.1 / V


def selected(z, t, temperature=0.7):
    """Return log-probabilities as TRL's selective_log_softmax does."""
    z = z / temperature
    lse = torch.stack([torch.logsumexp(row, dim=-1) for row in z])
    log_p = torch.gather(z, dim=-1, index=t.unsqueeze(-1)) - lse.unsqueeze(-1)
    return (log_p.squeeze(-1) * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum()


def row_by_row(z, t):
    rows = [
        row.log_softmax(-1).gather(-1, target.unsqueeze(-1))
        for row, target in zip(z, t, strict=True)
    ]
    return torch.stack(rows).square().mean()


def autocast_loss(z, t):
    """Return a loss under autocast. The product stays in float32, as in the model."""
    with torch.autocast("cpu", torch.bfloat16):
        return flat_loss(z, t)


def entropies(z, t):
    """Return entropies as TRL's entropy_from_logits does, with gradients and without."""
    total = 0
    for chunk in z.reshape(-1, V).split(4, dim=0):
        log_p = F.log_softmax(chunk, dim=-1)
        total += (torch.exp(log_p) * log_p).sum(-1).square().sum()
    log_p = z.detach().log_softmax(-1)
    return total * torch.sum(log_p * log_p.exp(), -1).mean()


def along(z, t):
    """Return log-probabilities as OnlineDPOTrainer does."""
    log_p = z[:, 1:].log_softmax(dim=-1)
    return torch.take_along_dim(log_p, t[:, 1:].unsqueeze(-1), dim=2).square().sum()


def logged(z, t):
    """Return means of logits, without gradients."""
    first, rest = z[:1].detach(), torch.split(z, [1, 2])[1].chunk(2)[0].detach()
    with torch.no_grad():
        third = z.mean()
    return flat_loss(z, t) * (first.mean() + rest.mean(-1).square().sum() + third)


RETURNED = {
    "entropies": entropies,
    "along a dimension": along,
    "logged means": logged,
    "detached": lambda z, t: flat_loss(z, t) * flat_loss(z.detach() * BIAS, t),
    "cross-entropy": flat_loss,
    "flattened": lambda z, t: F.cross_entropy(input=z.flatten(0, -2), target=t.flatten()),
    "of some tokens": lambda z, t: F.cross_entropy(z[t != 3].float(), t[t != 3]),
    "another autocast": autocast_loss,
    "smoothed": smoothed,
    "mean of log-probabilities": lambda z, t: torch.log_softmax(z, 2).mean(-1).square().sum(),
    "selected": selected,
    "row by row": row_by_row,
    "z-loss": lambda z, t: flat_loss(z, t) + z.logsumexp(-1, keepdim=True).square().mean(),
    "with and without gradients": lambda z, t: measured(z, t) * z.log_softmax(-1).sum(-1).mean(),
    "negative": lambda z, t: flat_loss(-z, t) + torch.neg(-z.log_softmax(-1)).sum(-1).mean(),
}  # fmt: skip


@torch.no_grad()
def measured(z, t):
    return (z.argmax(-1) == t).float().mean() + z.logsumexp(dim=-1).mean()


def check_returned(model, run, loss):
    ids = torch.randint(V, (3, 5))
    expected = loss(model(ids)["logits"], ids)
    expected.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with storage_ops.patch_causal_lm(model, logits="deferred"):
        logits = run(model)(ids)["logits"]
        assert not isinstance(logits, torch.Tensor)
        got = loss(logits, ids)
        got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        atol = 1e-6 * max(1.0, grads[name].abs().max().item())
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=atol)


@pytest.mark.parametrize("head", ["capped", "scaled by class"])
@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_of_returned_logits(name, head):
    check_returned(Toy(HEADS[head], bias=True).double(), lambda model: model, RETURNED[name])


def test_a_loss_of_logits_that_a_compiled_model_returns():
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    check_returned(Toy(), compiled, smoothed)


def test_returned_logits_are_deferred_only_in_training():
    ids = torch.randint(V, (3, 5))
    model = Toy()
    plain = model(ids)["logits"]
    storage_ops.patch_causal_lm(model, logits="deferred")
    outputs = model(ids)
    assert outputs["logits"].shape == plain.shape
    torch.testing.assert_close(outputs["logits"].formed(), plain)
    assert model(ids, labels=ids)["logits"] is None
    with torch.no_grad():
        torch.testing.assert_close(model(ids)["logits"], plain)
    model.eval()
    torch.testing.assert_close(model(ids)["logits"], plain)
    torch.testing.assert_close(model(ids, labels=ids)["logits"], plain)


def test_logits_in_the_outputs_of_an_inner_model():
    class Nested(Toy):
        def forward(self, input_ids, labels=None):
            outputs = super().forward(input_ids, labels)
            z = outputs["logits"]
            return {**outputs, "part": {"logits": z, "other": [1]}, "parts": ((z, z[:, 1:]), None)}

    ids, model = torch.randint(V, (3, 5)), Nested().eval()
    right = model(ids, labels=ids)
    storage_ops.patch_causal_lm(model)
    outputs = model(ids, labels=ids)
    torch.testing.assert_close(outputs, right)
    assert outputs["logits"] is outputs["part"]["logits"] is outputs["parts"][0][0]
    outputs = model.train()(ids, labels=ids)
    assert outputs["part"] == {"logits": None, "other": [1]}
    assert outputs["parts"] == ((None, None), None)


REFUSED_OF_RETURNED = {
    "operator *=": lambda z, t: operator.imul(z, 2),
    "operator /=": lambda z, t: operator.itruediv(z, 2),
    "operator +=": lambda z, t: operator.iadd(z, BIAS),
    "'softmax'": lambda z, t: F.softmax(z, -1),
    "'clone'": lambda z, t: z.clone(),
    "a mean of logits, with gradients,": lambda z, t: z.mean(),
    "exp of anything but log_softmax": lambda z, t: z.exp(),
    "chunk in dimension -1": lambda z, t: z.chunk(2, -1),
    "take_along_dim without": lambda z, t: torch.take_along_dim(z, t),
    "a product with other tensors": lambda z, t: z.log_softmax(-1).exp() * BIAS,
    "the attribute 'sum'": lambda z, t: z.log_softmax(-1).exp().sum(),
    "the function 'log'": lambda z, t: torch.log(z.log_softmax(-1).exp()),
    "storage_ops.linear_kl_div": lambda z, t: F.kl_div(z.log_softmax(-1), z.formed()),
    "a sum of logits": lambda z, t: z.sum(-1),
    "a sum over None": lambda z, t: z.log_softmax(-1).sum(),
    "gather in dimension 1": lambda z, t: z.gather(1, t.unsqueeze(-1)),
    "gather of (3, 5, 2)": lambda z, t: z.gather(-1, t.unsqueeze(-1).expand(3, 5, 2)),
    "logsumexp of log_softmax": lambda z, t: z.log_softmax(-1).logsumexp(-1),
    "logsumexp in dimension (1, 2)": lambda z, t: z.logsumexp((1, 2)),
    "argmax in dimension None": lambda z, t: z.argmax(),
    "argmax of negative": lambda z, t: (-z.log_softmax(-1)).argmax(-1),
    "log_softmax of negative": lambda z, t: (-z.log_softmax(-1)).log_softmax(-1),
    "cross_entropy of negative": lambda z, t: flat_loss(-z.log_softmax(-1), t),
    "flatten(0, -1)": lambda z, t: z.flatten(),
    "operator iter": lambda z, t: list(z[0, 0]),
}


@pytest.mark.parametrize("words", REFUSED_OF_RETURNED)
def test_unsupported_operations_on_returned_logits(words):
    ids = torch.randint(V, (3, 5))
    model = Toy()
    storage_ops.patch_causal_lm(model, logits="deferred")
    with pytest.raises(NotImplementedError) as caught:
        REFUSED_OF_RETURNED[words](model(ids)["logits"], ids)
    for part in (words, "Toy", "formed()", 'logits="eval"'):
        assert part in str(caught.value)


def test_a_class_out_of_range_is_not_ignored():
    ids = torch.randint(V, (3, 5))
    model = Toy()
    storage_ops.patch_causal_lm(model, logits="deferred")
    with pytest.raises(RuntimeError, match="`target` -100 is out of range"):
        model(ids)["logits"].gather(-1, torch.full((3, 5, 1), -100))


def test_returned_logits_without_their_weight_or_in_data_parallel():
    ids = torch.randint(V, (3, 5))
    model = Toy()
    storage_ops.patch_causal_lm(model, logits="deferred")
    logits = model(ids)["logits"]
    logits.origin.weight.data.untyped_storage().resize_(0)  # FSDP frees weights in this way
    with pytest.raises(RuntimeError, match=r"of Toy was freed.*reshard_after_forward=False"):
        flat_loss(logits, ids)
    model._is_replica = True  # torch.nn.DataParallel sets it
    with pytest.raises(RuntimeError, match=r"Toy with logits.*DataParallel"):
        model(ids)
