"""Simulated autocast casts the ops that torch casts on a GPU, which differ from a CPU's."""

import json
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from storage_ops.cli import main
from storage_ops.memory import measure, simulate_step
from storage_ops.simulate.patches import autocast

from .. import hf_config

OPS = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of a dtype": lambda x: torch.softmax(x, -1, dtype=torch.bfloat16),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(
        x, torch.zeros(4, dtype=torch.int64, device=x.device)
    ),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "number to a power": lambda x: 2.0**x,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "softplus": F.softplus,
    "log": torch.log,
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(0),
    "cumsum": lambda x: x.cumsum(0),
    "prod": torch.prod,
    "norm": torch.norm,
    "vector norm": torch.linalg.vector_norm,
    "mean": torch.mean,
    "var": torch.var,
    "gelu": F.gelu,
    "silu": F.silu,
    "matmul": lambda x: x @ x.t(),
    "linear": lambda x: F.linear(x, x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "addcmul": lambda x: torch.addcmul(x, x, x.float()),
    "cat": lambda x: torch.cat([x, x.float()]),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
}

FUSED_ON_A_GPU = {OPS["rms_norm"]}  # where torch is built for CUDA, also for fake tensors


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.results.append((str(func), out.dtype))
        return out


def calls(function, dtype, device):
    """Return the ops of a call and the dtypes of their results. A fused kernel is one op."""
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, 4, dtype=dtype, device=device)
        with Calls() as mode:
            out = function(x)
    return [("result", out.dtype)] if function in FUSED_ON_A_GPU else mode.results


@pytest.fixture
def autocast_on_cuda():
    """Enable autocast for CUDA, which `torch.autocast` refuses without a GPU."""
    torch.set_autocast_enabled("cuda", True)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_dtype("cuda", before)
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_ops_are_cast_as_on_a_gpu(name, dtype, autocast_on_cuda):
    expected = calls(OPS[name], dtype, "cuda")
    with autocast.autocast_of_gpu(), torch.autocast("cpu", torch.bfloat16):
        assert calls(OPS[name], dtype, "cpu") == expected


def test_the_lists_of_the_cpu_are_restored():
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        with autocast.autocast_of_gpu():
            assert x.softmax(-1).dtype == torch.float32
        assert x.softmax(-1).dtype == torch.bfloat16


def test_every_name_is_an_op_of_this_torch():
    """The ops that autocast of a GPU casts depend on the version of torch."""
    lists = autocast._FLOAT32, autocast._RESULT_IN_FLOAT32, autocast._LOWER, autocast._WIDEST
    names = [name for names in lists for name in names.split()]
    assert len(names) == len(set(names))
    known = set(torch._C._dispatch_get_all_op_names())
    assert {f"aten::{name}" for name in names} <= known
    aten = [name[6:] for name in known if re.match(r"aten::\w", name)]
    cast = {name for name in aten if autocast._has_kernel(name, "AutocastCUDA")}
    both = {name for name in aten if autocast._has_kernel(name, "AutocastCPU")}
    # These ops run inside other ops, in recurrent layers, which are not simulated on a GPU, or with
    # named dimensions, which torch 2.10 has.
    left = "convolution", "cell", "_cudnn_rnn", "flash_attention", "norm.S", "imname", "norm.names"
    others = {name for name in cast - both if not any(word in name for word in left)}
    assert others <= set(names)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 512)

    def forward(self, x):
        return self.up(self.norm(x)).softmax(-1)


def test_a_step_on_a_gpu_saves_cast_tensors():
    """The result of the softmax is in float32, and is saved."""
    model, x = Head(), torch.randn(1024, 64)
    with torch.autocast("cpu", torch.bfloat16):
        gpu = simulate_step(model, x, device="h100").by_owner
        cpu = simulate_step(model, x, device="cpu").by_owner
    result = 1024 * 512 * 4
    assert gpu["activations"] >= result > cpu["activations"]


SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 256}


@pytest.fixture
def command(tmp_path):
    pytest.importorskip("transformers")
    path = hf_config.write(tmp_path, **SIZES)
    return ["will-it-fit", "--hf-config", path, "--batch", "2", "--seq", "128", "--json"]


def facts_of(command, capsys):
    assert main(command) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.in_turn
def test_the_command_on_a_cpu_gives_the_measured_peak(command, capsys):
    options = ["--autocast", "bf16", "--optimizer", "none", "--device", "cpu"]
    simulated = facts_of([*command, *options], capsys)
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(command[2])
    config.use_cache = False
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 256, (2, 128))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN packs operands
        step()
        with measure() as m:
            step()
    before = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), ids))
    assert simulated["peak_bytes"] == pytest.approx(m.peak_bytes + before, rel=0.01)
    assert simulated["by_owner"]["parameters"] == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.in_turn
def test_the_command_gives_the_peak_of_a_real_model(command, capsys):
    simulated = facts_of([*command, "--autocast", "bf16"], capsys)["peak_bytes"]
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(command[2])
    config.use_cache = False
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 256, (2, 128))
    with torch.autocast("cpu", torch.bfloat16):
        step = simulate_step(
            model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW, device="h100"
        )
    assert simulated == pytest.approx(step.peak_bytes, rel=2e-3)


@pytest.mark.in_turn
def test_fit_and_a_function_with_labels_of_its_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
        "def f(batch=512):\n"
        "    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]\n"
        "    target = torch.empty(batch, 64)\n"
        "    return nn.Sequential(*layers), torch.empty(batch, 64), "
        "lambda out: F.mse_loss(out, target)\n"
    )
    model = ["--model", f"{tmp_path}/mine.py:f", "--budget", "67MiB"]
    options = [*model, "--autocast", "fp16", "--json"]
    owners = facts_of(["will-it-fit", *options], capsys)["by_owner"]
    assert owners["parameters"] == 4 * 4 * (64 * 64 + 128)  # rounded up to 512 bytes
    assert facts_of(["fit", *options], capsys)["peak_bytes"] <= 67 << 20
    assert facts_of(["fit", *options, "--find", "batch"], capsys)["found"] > 512


def test_other_dtypes(command, capsys):
    assert main([*command, "--autocast", "fp32"]) == 2
    assert "--autocast is fp32. Expected bf16 or fp16" in capsys.readouterr().err
