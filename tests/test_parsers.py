"""Any wrong text in a config, a plan, a size or the name of an op raises a clear error.

The package runs nothing that it reads. No parser calls eval or loads a pickle.
"""

import copy
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import storage_ops as so
from storage_ops.foundation.op_names import resolve
from storage_ops.quantities import parse_bytes

Config = so.ActivationCheckpointConfig
FIELDS = sorted(Config.__dataclass_fields__)
DEEP = "[" * 100_000
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["selective", "full", "aten.mm", "matmuls", "layers.*", "__class__"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def answers(parse, *args):
    """Return the result, or None for an expected error."""
    try:
        return parse(*args)
    except (TypeError, ValueError):
        return None


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), VALUES, max_size=4))
def test_configs(values):
    for config in (
        answers(Config.from_dict, values),
        answers(Config.from_json, json.dumps(values)),
    ):
        assert config is None or config.effective_mode in ("full", "selective", "output_discard")


@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_texts_of_configs(text):
    answers(Config.from_json, text)
    answers(Config.from_yaml, text)


# Both depths exceed the limit of the parser. The error of a deeper YAML text takes seconds.
@pytest.mark.parametrize(
    ("parse", "deep"), [(Config.from_json, DEEP), (Config.from_yaml, DEEP[:500])]
)
@pytest.mark.parametrize("text", ["(deep)", '{"policy": (deep)', "!!python/object:os.system {}"])
def test_harmful_configs(parse, deep, text):
    text = text.replace("(deep)", deep)
    with pytest.raises(ValueError, match=r"The config is not (JSON|YAML)"):
        parse(text)


@given(st.text() | st.from_regex(r"[0-9.eE+-]{1,12} ?[KMGTkmgt]?i?[bB]?", fullmatch=True))
def test_sizes(text):
    size = answers(parse_bytes, text, "budget")
    assert size is None or size >= 0


@given(st.text() | st.from_regex(r"(torch\.ops\.)?aten\.[a-z_.]{1,12}", fullmatch=True))
def test_names_of_ops(name):
    ops = answers(resolve, [name], "ops_to_save")
    assert ops is None or all(re.fullmatch(r"[\w.]+::?[\w.]+|[\w.]+", op) for op in ops)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Return the saved text of a plan for a model, and the model."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))] * 1)
    path: Path = tmp_path_factory.mktemp("plan") / "fit.json"
    so.fit(model, torch.randn(4, 8), budget="1GiB").save(path)
    return path, json.loads(path.read_text()), model


def changed(value, at, other):
    """Return a JSON value whose part with number `at`, in the order of a walk, is replaced."""
    count = [0]

    def walk(value):
        count[0] += 1
        if count[0] - 1 == at:
            return other
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    return walk(value)


@settings(max_examples=200)
@given(at=st.integers(0, 60), other=VALUES)
def test_plans(plan, at, other):
    path, values, model = plan
    damaged = path.with_name("damaged.json")
    damaged.write_text(json.dumps(changed(values, at, other)))
    loaded = answers(so.load_fit, damaged, model)
    if loaded is not None:
        str(loaded)
        if answers(lambda: (loaded.apply(), True)) is not None:
            loaded.undo()
    assert all(type(m) in (nn.Sequential, nn.Linear, nn.GELU) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "value"), [("step_seconds", 0), ("step_seconds", math.inf), ("seconds", math.nan)]
)
def test_impossible_times_are_no_plan(name, value, plan, tmp_path):
    """Such a plan could not be printed."""
    (tmp_path / "no.json").write_text(json.dumps(plan[1] | {name: value}))
    with pytest.raises(ValueError, match="is not a plan of fit"):
        so.load_fit(tmp_path / "no.json", plan[2])


ACTION = {"layer": "0", "mode": "full"}
WRONG = {
    "actions": [
        ("layer", 1), ("mode", 5), ("mode", "tile"), ("saved", "mm"), ("saved", [[1, 2]]),
        ("saved", [["mm", -1]]), ("offloaded", [["mm", "1"]]), ("discarded", "0"), ("tiled", [1]),
        ("tiles", "4"), ("memory_budget", -1), ("memory_budget", True), ("patched", "no"),
    ],
    "rows": [
        ("names", []), ("action", 1), ("kept_bytes", 1.5), ("peak_bytes", "1"), ("seconds", "1"),
    ],
    "conditions": [
        ("shapes", {"x": "12"}), ("shapes", {"x": [-1]}), ("autocast", None), ("accumulate", 0),
        ("optimizer", "no"),
    ],
    "plan": [
        ("peak_bytes", True), ("budget", "1GiB"), ("budget", -1), ("seconds", "1"), ("model", 1),
        ("step_seconds", True), ("device", None), ("totals", {"none": [-1, 0]}), ("rows", {}),
        ("is_calibrated", 1), ("fingerprint", [["a", "b"]]), ("actions", {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("part", "name", "value"), [(p, *f) for p in WRONG for f in WRONG[p]])
def test_wrong_values_are_no_plan(part, name, value, plan, tmp_path):
    values = copy.deepcopy(plan[1]) | {"actions": [dict(ACTION)]}
    (tmp_path / "fit.json").write_text(json.dumps(values))
    so.load_fit(tmp_path / "fit.json", plan[2])
    where = values if part == "plan" else values[part]
    (where[0] if isinstance(where, list) else where)[name] = value
    (tmp_path / "fit.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is not a plan of fit"):
        so.load_fit(tmp_path / "fit.json", plan[2])


@pytest.mark.parametrize("text", ["", "[]", "{}", DEEP, '{"format": 1}', "\x00"])
def test_texts_that_are_no_plan(text, plan, tmp_path):
    (tmp_path / "no.json").write_text(text)
    with pytest.raises(ValueError, match="is not a plan of fit"):
        so.load_fit(tmp_path / "no.json", plan[2])
