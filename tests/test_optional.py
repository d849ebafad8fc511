"""Every error for a missing package names the package, its user and the command to install it."""

import re
import sys

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops import cli
from storage_ops.integrations import lightning_callback, trainer_callback
from storage_ops.optional import required


def measured():
    with so.memory.measure() as m:
        torch.empty(64)
    return m


def estimated():
    return so.memory.estimate(torch.relu, torch.ones(64))


def step():
    return so.memory.simulate_step(nn.Linear(8, 8), torch.ones(2, 8))


USERS = {
    "Measurement.plot": ("matplotlib", "drawing m.png", lambda: measured().plot("m.png")),
    "a page": ("plotly", "drawing m.html", lambda: measured().plot("m.html")),
    "Estimate.plot": ("matplotlib", "drawing m.svg", lambda: estimated().plot("m.svg")),
    "StepEstimate.plot": ("matplotlib", "drawing m", lambda: step().plot("m")),
    "from_yaml": ("yaml", "from_yaml", lambda: so.ActivationCheckpointConfig.from_yaml("{}")),
    "trainer": ("transformers", "trainer_callback", lambda: trainer_callback(__file__)),
    "table": ("rich", "a table", lambda: str(so.checkpoint_report(nn.Linear(2, 2)))),
}


@pytest.mark.parametrize("name", USERS)
def test_a_missing_package_is_named(name, monkeypatch):
    package, user, use = USERS[name]
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    pip = {"yaml": "pyyaml"}.get(package, package)
    text = f"{user} needs {package}, which is not installed. Run: pip install {pip}"
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(text)}$") as raised:
        use()
    assert raised.value.name == package


def test_lightning_has_two_names(monkeypatch):
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs lightning, .* pip install lightning$"):
        lightning_callback(__file__)


@pytest.mark.parametrize("package", ["matplotlib", "tokenizers", "transformers"])
def test_commands_without_a_package_exit_with_2(package, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    step = ["--hf-config", str(tmp_path), "--seq", "8"]
    commands = {"transformers": [["fit", *step], ["will-it-fit", *step]]}
    for command in commands.get(package, [["demo"]]):
        assert cli.main(command) == 2
        assert capsys.readouterr().err.endswith(f"Run: pip install {package}\n")


def test_a_package_that_does_not_import_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("broken_one", "import not_there"), ("broken_two", "raise ImportError(3)")):
        (tmp_path / f"{name}.py").write_text(code)
        match = f"^this needs {name}, which is installed, but its import fails: (No mod|3)"
        with pytest.raises(ImportError, match=match) as raised:
            required(name, "this")
        assert type(raised.value) is ImportError


@pytest.mark.parametrize("version", ["4.48.1", "4.9", "3.0.2.dev0"])
def test_a_version_that_is_too_old_is_named(version, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    transformers = sys.modules["transformers"]  # another object than before the model was built
    monkeypatch.setattr(transformers, "__version__", version)
    for user, use in (
        ("patch_causal_lm", lambda: so.patch_causal_lm(model)),
        ("trainer_callback", lambda: trainer_callback(__file__)),
    ):
        text = f"{user} needs transformers 4.57 or newer, and {version} is installed. Run: pip"
        with pytest.raises(ImportError, match=f"^{re.escape(text)}"):
            use()
    assert type(model).__name__ == "GPT2LMHeadModel" and not hasattr(model, "_loss_options")
    monkeypatch.setattr(transformers, "__version__", "5.0.0rc1")
    required("transformers", "this")
