"""`--model FILE.py:FUNCTION` of `will-it-fit` and `fit`."""

import json
import subprocess
import sys

import pytest
import torch

from storage_ops.cli import main
from tests.commands import answer

pytestmark = pytest.mark.in_turn

FILE = """
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F
from sizes import WIDTH

@dataclass
class Sizes:
    layers: int = 3

def plain():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(Sizes().layers)]
    return nn.Sequential(*layers), torch.empty(512, WIDTH)

def sized(batch=2, seq=8):
    model, _ = plain()
    labels = torch.zeros(batch, seq, dtype=torch.int64)
    def loss(out):
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())
    return model, torch.empty(batch, seq, WIDTH), loss

def needs(batch):
    return sized(batch)

def with_width(width):
    return plain()

def with_cpu_parameter():
    model = plain()[0]
    model[0][0].bias = nn.Parameter(torch.Tensor(WIDTH))
    return model, torch.empty(512, WIDTH)

a_model = nn.Linear(WIDTH, WIDTH)

class Mixed(nn.Linear):
    def forward(self, x):
        return torch.bmm(x[None], self.weight[None].double())

class Empty(nn.Linear):
    def forward(self, x):
        return x + torch.arange(None, device=x.device, dtype=x.dtype)

def mixed():
    return Mixed(WIDTH, WIDTH), torch.empty(512, WIDTH)

def empty():
    return Empty(WIDTH, WIDTH), torch.empty(512, WIDTH)

def number():
    return 3

def without_batch():
    return plain()[:1]

def text():
    return plain()[0], "x"

def no_loss():
    return *plain(), 3

def fails():
    return plain(1)

class Prints(nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def prints():
    print("function")
    return Prints(WIDTH, WIDTH), torch.empty(512, WIDTH)

def large(batch):
    return nn.Linear(WIDTH, WIDTH), torch.empty(batch, WIDTH)

def exits():
    raise SystemExit(0)

class Exits(nn.Linear):
    def forward(self, x):
        raise SystemExit(0)

def exits_later():
    return Exits(WIDTH, WIDTH), torch.empty(512, WIDTH)

def is_interrupted():
    raise KeyboardInterrupt

class Decides(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y

def decides():
    return Decides(WIDTH, WIDTH), torch.empty(512, WIDTH)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "sizes.py").write_text("WIDTH = 64")
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def test_a_model_and_a_batch(file, capsys):
    command = ["will-it-fit", "--model", f"{file}:plain", "--optimizer", "none"]
    owners = answer(command, capsys)["by_owner"]
    assert owners["parameters"] == 3 * (64 * 64 + 64 + 64) * 4 and owners["batch"] == 512 * 64 * 4
    owners = answer([*command, "--dtype", "bf16"], capsys)["by_owner"]
    assert owners["batch"] == 512 * 64 * 2


def test_parameters_that_the_function_creates_on_the_cpu(file, capsys):
    """torch.Tensor(size) ignores the meta device."""
    on_meta, partly_on_cpu = (
        answer(["will-it-fit", "--model", f"{file}:{name}"], capsys)
        for name in ("plain", "with_cpu_parameter")
    )
    assert partly_on_cpu == on_meta


def test_cuda_without_a_gpu_is_the_default_gpu(file, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["will-it-fit", "--model", f"{file}:plain"]
    assert answer([*command, "--device", "cuda"], capsys) == answer(command, capsys)


def test_an_error_of_the_simulation_names_no_argument_of_python(file, capsys):
    for command in ("will-it-fit", "fit"):
        assert main([command, "--model", f"{file}:decides"]) == 2
        err = capsys.readouterr().err
        assert "the simulated code needs the values of a tensor" in err and "`" not in err


def test_json_is_alone_on_the_standard_output(file, capsys):
    for command in ("will-it-fit", "fit"):
        assert main([command, "--model", f"{file}:prints", "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) and {"function", "forward"} <= set(err.split())


def test_a_batch_above_the_budget(file, capsys):
    command = ["will-it-fit", "--model", f"{file}:large", "--batch", "1000000"]
    assert main([*command, "--budget", "100MiB"]) == 1
    said = capsys.readouterr().out
    assert "the batch takes 244.2 MiB" in said and said.endswith("Choose a smaller batch.\n")
    assert main([*command, "--budget", "1MiB"]) == 1
    assert "workspaces alone take 64.1 MiB" in capsys.readouterr().out


def test_an_interrupt_is_one_line(file, capsys):
    assert main(["will-it-fit", "--model", f"{file}:is_interrupted"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("mixed", "A step of Mixed raised RuntimeError: expected scalar type"),
        ("empty", "device=torch.device"),
    ],
)
def test_an_error_of_the_model_is_one_line_with_its_message(function, said, file):
    """Run the command in a separate process to read its logs."""
    command = [sys.executable, "-m", "storage_ops", "will-it-fit", "--model", f"{file}:{function}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_options_become_arguments_that_the_function_has(file, capsys):
    batches = [
        answer(["will-it-fit", "--model", f"{file}:sized", *options], capsys)["by_owner"]["batch"]
        for options in ([], ["--batch", "16", "--seq", "64"])
    ]
    assert batches[1] == 64 * batches[0]


def test_fit_takes_the_loss(file, capsys):
    command = ["fit", "--model", f"{file}:sized", "--batch", "64", "--seq", "64"]
    facts = answer([*command, "--budget", "1GiB"], capsys)
    assert facts["model"] == "Sequential" and facts["peak_bytes"] > 0


@pytest.mark.parametrize("size", ["batch", "seq"])
def test_find_calls_the_function_for_each_size(size, file, capsys):
    """The loss has labels of the same size."""
    command = ["fit", "--model", f"{file}:sized", "--budget", "66MiB"]
    facts = answer([*command, "--find", size], capsys)
    assert facts["found"] >= facts["kept"]["size"] > 1
    assert main([*command, f"--{size}", str(facts["found"])]) == 0
    assert main([*command, f"--{size}", str(facts["found"] + 1)]) == 1


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        pytest.param(
            "nothing",
            [],
            "has no function nothing. Expected one of plain, sized, needs,",
            id="missing function",
        ),
        pytest.param(
            "number",
            [],
            "which returned int. Expected (model, batch) or (model, batch, loss)",
            id="number",
        ),
        pytest.param("a_model", [], "which raised TypeError: Linear.forward()", id="a model"),
        pytest.param("without_batch", [], "which returned tuple (Sequential)", id="no batch"),
        pytest.param(
            "text",
            [],
            "which returned a batch of type str. Expected a tensor",
            id="text as batch",
        ),
        pytest.param(
            "no_loss",
            [],
            "which returned a loss of type int. Expected a function",
            id="number as loss",
        ),
        pytest.param(
            "fails",
            [],
            "which raised TypeError: plain() takes 0 positional arguments",
            id="TypeError",
        ),
        pytest.param(
            "fails",
            [],
            f"at line {FILE.splitlines().index('    return plain(1)') + 1}.",
            id="line of the error",
        ),
        pytest.param(
            "with_width",
            [],
            "which needs an argument width. Expected a function without arguments",
            id="unknown argument",
        ),
        pytest.param("exits", [], "which raised SystemExit: 0 at line", id="exit"),
        pytest.param("exits_later", [], "A step of Exits raised SystemExit: 0 at", id="later exit"),
        pytest.param("plain", ["--autocast", "fp8"], "--autocast is fp8. Expected bf16", id="fp8"),
        pytest.param("needs", [], "--batch is missing, but", id="missing batch size"),
        pytest.param("plain", ["--batch", "2"], "--batch is 2, but", id="unused batch size"),
        pytest.param(
            "plain", ["--batch", "0"], "--batch is 0. Expected 1 or more", id="batch size of 0"
        ),
    ],
)
def test_complaints(function, options, said, file, capsys):
    for command in ("will-it-fit", "fit"):
        assert main([command, "--model", f"{file}:{function}", *options]) == 2
        out, err = capsys.readouterr()
        assert said in err and not out and err.count("\n") == 1


@pytest.mark.parametrize(
    ("spelled", "said"),
    [
        ("mine.py", "Expected a file and a function: FILE.py:FUNCTION"),
        ("mine:f", "Expected a file and a function: FILE.py:FUNCTION"),
        ("no.py:f", "there is no file no.py"),
        ("broken.py:f", "whose file raised NameError: name 'x' is not defined"),
        ("exits.py:f", "whose file raised SystemExit: 0. Expected a file that"),
    ],
)
def test_files_that_do_not_run(spelled, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("x")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    assert main(["will-it-fit", "--model", spelled]) == 2
    assert said in capsys.readouterr().err


def test_find_needs_an_argument_of_that_name(file, capsys):
    assert main(["fit", "--model", f"{file}:plain", "--find", "batch"]) == 2
    assert "--find is batch, but" in capsys.readouterr().err
    assert main(["fit", "--model", f"{file}:sized", "--batch", "4", "--find", "batch"]) == 2
    assert "--batch is 4, but --find batch finds it" in capsys.readouterr().err


@pytest.mark.parametrize("which", [[], ["--model", "a.py:f", "--hf-config", "x"]])
def test_exactly_one_model_option_is_required(which, capsys):
    with pytest.raises(SystemExit):
        main(["will-it-fit", *which])
    assert "--hf-config" in capsys.readouterr().err
