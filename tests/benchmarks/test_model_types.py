"""The table of answers for model types, with small models."""

import os
import signal
import threading

import pytest

from benchmarks import _model_types, model_types
from benchmarks._model_types import Case, cases
from benchmarks.report import pages

pytest.importorskip("transformers", minversion="5.13")  # the first with all types of the table

TINY = {
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 128},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    "vit": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
}


def case_of(name):
    return next(case for case in cases() if case.name == name)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", TINY)
def test_the_row_of_a_model(name, monkeypatch):
    """GPT-2 and T5 have tied weights, which count once."""
    monkeypatch.setitem(_model_types.CHANGES, name, TINY[name])
    row = model_types.answer_of(case_of(name))
    assert row["answer"] == "fits" and row["case"] == name
    assert row["peak (MiB)"] > 6 * row["parameters"] / (1 << 20)


@pytest.mark.in_turn
def test_a_wrong_number_of_parameter_bytes_is_an_error(monkeypatch):
    monkeypatch.setitem(_model_types.CHANGES, "gpt2", TINY["gpt2"])
    monkeypatch.setattr(model_types, "parameter_bytes", lambda model: 3)
    answer = model_types.answer_of(case_of("gpt2"))["answer"]
    assert answer.startswith(model_types.BROKEN) and answer.endswith("expected 3")


def test_a_refusal_has_the_message_of_the_command():
    case = Case("transformers: none", "no", "No", "1", lambda folder: ["--hf-config", str(folder)])
    answer = model_types.answer_of(case)["answer"]
    assert answer.startswith("refused: ") and "config.json" in answer


def test_every_type_has_a_class_and_a_unique_name():
    all_cases = cases()
    assert len({case.name for case in all_cases}) == len(all_cases) >= 78
    assert all(case.model_class for case in all_cases)


def test_a_failed_process_has_a_row(monkeypatch):
    case = case_of("gpt2")
    monkeypatch.setattr(model_types, "answer_of", lambda case: os.kill(os.getpid(), signal.SIGKILL))
    assert model_types.answer_in_process(case)["answer"] == model_types.BROKEN + "exit code -9"
    monkeypatch.setattr(model_types, "answer_of", lambda case: threading.Event().wait())
    monkeypatch.setattr(model_types, "SECONDS", 0.1)
    answer = model_types.answer_in_process(case)["answer"]
    assert answer == model_types.BROKEN + "no answer in 0.1 seconds"
    monkeypatch.setattr(model_types, "SECONDS", 60)
    monkeypatch.setattr(
        model_types, "answer_of", lambda case: {"case": case.name, "answer": "fits"}
    )
    assert model_types.answer_in_process(case) == {"case": "gpt2", "answer": "fits"}


def test_the_page_has_a_table_for_each_family(monkeypatch):
    row = {
        "shape": "timm", "case": "a", "class": "A", "batch": "1", "parameters": 3 * 10**9,
        "peak (MiB)": 2048.0, "answer": "fits", "seconds": 1.5, "assumes": "text alone",
    }  # fmt: skip
    refused = {"shape": "diffusers", "case": "b", "class": "B", "batch": "1", "answer": "refused"}
    result = {"day": "2026-01-01", "hardware": "h", "torch": "t", "gpu": None}
    monkeypatch.setattr(pages, "results_of", lambda stem: [{**result, "rows": [row, refused]}])
    text = pages.model_types()
    assert "### timm\n" in text and "### diffusers\n" in text
    assert "| a | `A` | 3 | 1 | 2 GiB | 1.5 | fits. text alone |" in text
