"""Values that configs accept and refuse, which layers they match, and formats they load."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import storage_ops as so
from storage_ops.foundation.op_names import resolve

from ..refused import refused
from .blocks import Block, Model, make_input, step

Config = so.ActivationCheckpointConfig


@pytest.fixture(scope="module", autouse=True)
def custom_op():
    with torch.library._scoped_library("so_config_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("twice.scaled(Tensor x, float s) -> Tensor")
        library.define("bump_(Tensor(a!) x) -> ()")
        yield


@pytest.mark.parametrize(
    ("name", "overloads"),
    [
        ("aten.mm", {"aten::mm", "aten::mm.dtype"}),
        ("aten.mm.default", {"aten::mm"}),
        ("aten::mm", {"aten::mm", "aten::mm.dtype"}),
        ("torch.ops.aten.mm", {"aten::mm", "aten::mm.dtype"}),
        ("torch.ops.aten.mm.default", {"aten::mm"}),
        (torch.ops.aten.mm, {"aten::mm", "aten::mm.dtype"}),
        (torch.ops.aten.mm.dtype, {"aten::mm.dtype"}),
        ("so_config_test.twice", {"so_config_test::twice", "so_config_test::twice.scaled"}),
        ("torch.ops.so_config_test.twice.scaled", {"so_config_test::twice.scaled"}),
        ("higher_order.cond", {"higher_order::cond"}),
        (torch.ops.higher_order.cond, {"higher_order::cond"}),
    ],
)
def test_op_names(name, overloads):
    assert resolve([name], "ops") == overloads
    Config(["Block"], ops_to_save=[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "aten.mmm",
            r"`ops_to_save` contains 'aten.mmm': there is no such op. Did you mean aten.mm",
        ),
        ("atn.mm", r"Did you mean aten.mm"),
        ("torch.ops.aten.adddmm.default", r"Did you mean aten.addmm"),
        ("aten.mm.defualt", r"no such overload. Expected one of default, dtype, dtype_out, out"),
        ("so_config_test.twise", r"Did you mean so_config_test.twice"),
        ("mm", r"'mm'. Expected the name of an op: namespace.name"),
        ("", "Expected the name of an op"),
        ("aten.mm.out", "modifies its arguments in place"),
        ("aten.add_", "modifies its arguments in place"),
        ("so_config_test.bump_", "modifies its arguments in place"),
    ],
)
@pytest.mark.parametrize("field", ["ops_to_save", "ops_to_recompute"])
def test_unknown_op_names_are_errors(name, message, field):
    with pytest.raises(ValueError, match=message.replace("ops_to_save", field)):
        Config(["Block"], **{field: [name]})


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch /nowhere')",
        "torch.load.__globals__['os'].getcwd()",
        "torch.ops.aten.mm.default if True else 0",
        "aten.mm; aten.bmm",
        "torch.ops.aten.mm.__class__",
        "lambda: 0",
    ],
)
def test_names_are_never_evaluated(code, monkeypatch):
    import builtins

    def refuse(*args, **kwargs):
        raise AssertionError("evaluated")

    monkeypatch.setattr(builtins, "eval", refuse)
    with pytest.raises(ValueError, match=r"Expected the name of an op|no such"):
        resolve([code], "ops_to_save")


@pytest.mark.in_turn
@given(st.text(max_size=30))
def test_any_text_is_a_name_or_an_error_that_repeats_it(text):
    try:
        assert resolve([text], "ops")
    except ValueError as error:
        assert repr(text) in str(error)


@given(st.sampled_from(sorted(torch._C._dispatch_get_all_op_names())))
@pytest.mark.filterwarnings("ignore:.*sees as several other ops:UserWarning")
def test_every_op_of_the_dispatcher_is_found_unless_it_modifies(name):
    packet, _, overload = name.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(packet)
    schema = next((s for s in schemas if s.overload_name == overload), None)
    if schema is None:  # an op without a schema that Python can see
        return
    spelled = f"torch.ops.{packet.replace('::', '.')}.{overload or 'default'}"
    if schema.is_mutable:
        with pytest.raises(ValueError, match="modifies its arguments"):
            resolve([spelled], "ops")
    else:
        assert resolve([spelled], "ops") == {name}


def test_a_composite_op_warns():
    with pytest.warns(UserWarning, match="'aten.linear', which autograd sees as several other ops"):
        Config(["Block"], ops_to_save=["aten.linear"])


BAD = [
    refused(
        TypeError, "<class 'int'>, a type. Expected subclasses of torch.nn", layer_classes=[int]
    ),
    refused(TypeError, "their names, such as 'Linear'", layer_classes=nn.Linear(1, 1)),
    refused(
        TypeError, "`layer_classes` contains 3, a int. Expected subc", layer_classes=["Block", 3]
    ),
    refused(TypeError, "`layer_names` contains 3, a int. Expected names", layer_names=3),
    refused(TypeError, "Expected names; layer_classes takes classes", layer_names=[Block]),
    refused(
        TypeError, "`layer_names` contains {'a': 1}, a dict. Expected names", layer_names={"a": 1}
    ),
    refused(
        TypeError, "`ops_to_save` contains 3, a int. Expected the name of an op", ops_to_save=3
    ),
    refused(
        TypeError, "`ops_to_save` contains 3, a int. Expected the name of an op", ops_to_save=[3]
    ),
    refused(TypeError, "Expected the name of an op", ops_to_save=[torch.mm]),
    refused(TypeError, r"`mm_shapes_to_save` contains \(3, 4\)", mm_shapes_to_save=[(3, 4)]),
    refused(TypeError, "`use_reentrant` is 'no'. Expected True or False", use_reentrant="no"),
    refused(TypeError, "`preserve_rng_state` is 1", preserve_rng_state=1),
    refused(TypeError, "`allow_no_match` is None", allow_no_match=None),
    refused(ValueError, "`every_k` is 0. Expected a whole number of at least 1", every_k=0),
    refused(ValueError, "`every_k` is 2.0", every_k=2.0),
    refused(ValueError, "`every_k` is True", every_k=True),
    refused(ValueError, "`mode` is 'ful'. Expected .*. Did you mean 'full'?", mode="ful"),
    refused(
        ValueError, "`determinism_check` is 'on'. Expected one of default", determinism_check="on"
    ),
    refused(ValueError, "`policy` is 'matmul'. .*Did you mean 'matmuls'?", policy="matmul"),
    refused(TypeError, "`policy` is 3, a int. Expected one of matmuls", policy=["matmuls", 3]),
    refused(ValueError, "`mode` is array.* Expected one of", mode=np.zeros(2)),
    refused(ValueError, "no option says what to save", mode="selective"),
    refused(ValueError, "no option says what to save", mode="selective", ops_to_save=[]),
    refused(ValueError, "but policy is given. Set `mode`", mode="full", policy="matmuls"),
    refused(ValueError, "ops_to_save is given", mode="output_discard", ops_to_save=["aten.mm"]),
    refused(
        ValueError, "`use_reentrant` is True with", use_reentrant=True, ops_to_save=["aten.mm"]
    ),
    refused(ValueError, "`use_reentrant` is True with", use_reentrant=True, mode="output_discard"),
    refused(
        ValueError,
        "`ops_to_recompute` has every op of `ops_to_save`",
        ops_to_save=["aten.mm.default"],
        ops_to_recompute=["aten.mm"],
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_wrong_values(options, error, message):
    with pytest.raises(error, match=message):
        Config(**{"layer_classes": ["Block"], **options})


@pytest.mark.parametrize(
    "classes",
    [
        Block, [Block], (Block,), {Block}, frozenset({Block}), "Block", {"Block"},
        [Block, "Block"],
    ],
)  # fmt: skip
def test_classes_stand_for_their_names(classes):
    cfg = Config(classes)
    named = Config(["Block"])
    assert set(cfg.layer_classes) == {"Block"}
    if len(cfg.layer_classes) == 1:
        assert dataclasses.replace(cfg, layer_classes=list(cfg.layer_classes)) == named
        assert Config(classes) == cfg == copy.deepcopy(cfg) == pickle.loads(pickle.dumps(cfg))
        assert repr(dataclasses.replace(cfg, layer_classes=["Block"])) == repr(named)
    assert Config.from_json(json.dumps(dataclasses.asdict(cfg))) == dataclasses.replace(
        cfg, layer_classes=list(cfg.layer_classes)
    )
    for way in (cfg, {"layer_classes": classes}):
        model = so.apply_activation_checkpoint(Model(), way)
        assert all(isinstance(layer, so.CheckpointWrapper) for layer in model.layers)


def test_subclasses_of_a_class_do_not_match():
    class Narrow(Block):
        pass

    model = Model()
    model.layers[1] = Narrow().to(next(model.parameters()))
    model = so.apply_activation_checkpoint(model, Config(Block))
    assert [isinstance(m, so.CheckpointWrapper) for m in model.layers][:3] == [True, False, True]


def test_a_single_name_or_op_needs_no_list():
    mm = torch.ops.aten.mm
    for field, one in (
        ("layer_names", "layers.*"), ("ops_to_save", "aten.mm"), ("ops_to_save", mm),
        ("ops_to_recompute", mm.default), ("ops_to_offload", mm), ("mm_shapes_to_save", "*"),
        ("mm_shapes_to_recompute", "*"),
    ):  # fmt: skip
        cfg = Config(["Block"], **{field: one})
        assert cfg == Config(["Block"], **{field: [one]}) == Config(["Block"], **{field: {one}})
        assert getattr(Config(["Block"], **{field: (one,)}), field) == (one,)


def test_the_default_mode_depends_on_the_rules():
    assert Config(["Block"]).effective_mode == "full"
    assert Config(["Block"], ops_to_save=[]).effective_mode == "full"
    for rule in (
        {"ops_to_save": ["aten.mm"]},
        {"ops_to_offload": [torch.ops.aten.mm.default]},
        {"policy": "attention"},
        {"mm_shapes_to_save": ["x"]},
    ):
        assert Config(["Block"], **rule).effective_mode == "selective"
    assert Config(["Block"], mode="output_discard").effective_mode == "output_discard"


VALUES = {
    "layer_classes": ["Block"],
    "ops_to_save": ["aten.mm"],
    "policy": ["attention", "every_other_mm"],
    "every_k": 2,
    "use_reentrant": False,
}


def test_from_dict_json_and_yaml(tmp_path):
    yaml = pytest.importorskip("yaml")
    expected = Config(**VALUES)
    (tmp_path / "a.json").write_text(json.dumps(VALUES))
    (tmp_path / "a.yml").write_text(yaml.safe_dump(VALUES))
    assert Config.from_dict(VALUES) == expected
    for source in (json.dumps(VALUES), tmp_path / "a.json", str(tmp_path / "a.json")):
        assert Config.from_json(source) == expected
    for source in (yaml.safe_dump(VALUES), tmp_path / "a.yml", str(tmp_path / "a.yml")):
        assert Config.from_yaml(source) == expected


@pytest.mark.parametrize(
    ("key", "near"),
    [("ops_to_sav", "ops_to_save"), ("layers", "layer_names"), ("use_reentrent", "use_reentrant"),
     ("zzz", None), (3, None)],
)  # fmt: skip
def test_unknown_keys_name_the_nearest(key, near):
    with pytest.raises(ValueError, match=f"unknown key {key!r}. Did you mean '{near or ''}"):
        Config.from_dict({"layer_classes": ["Block"], key: []})


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        pytest.param("[1, 2]", TypeError, "Expected a mapping", id="list"),
        pytest.param("3", TypeError, "The config is 3", id="number"),
        pytest.param("{", ValueError, None, id="unclosed brace"),
        pytest.param("nowhere.json", FileNotFoundError, None, id="missing file"),
        pytest.param(Path("nowhere"), FileNotFoundError, None, id="missing path"),
    ],
)
def test_invalid_sources_of_a_config_are_errors(source, error, message):
    with pytest.raises(error, match=message):
        Config.from_json(source)
    pytest.importorskip("yaml")
    with pytest.raises(error, match=message):
        Config.from_yaml("nowhere.yaml" if source == "nowhere.json" else source)


def test_yaml_never_creates_objects():
    pytest.importorskip("yaml")
    with pytest.raises(ValueError, match="The config is not YAML"):
        Config.from_yaml("policy: !!python/object/apply:os.getcwd []")


def test_without_pyyaml(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ImportError, match=r"from_yaml needs yaml, .* pip install pyyaml"):
        Config.from_yaml("layer_classes: [Block]")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layer_classes": ["Blok"]},
            r"No layer of Model matches: 'Blok' matches no module \(did you",
        ),
        ({"layer_classes": None}, "The config names no layers"),
        ({"layer_classes": [], "layer_names": []}, "The config names no layers"),
        ({"layer_classes": None, "layer_names": ["layer.*"]}, "'layer.*' matches no module"),
        ({"layer_classes": None, "layer_names": ["Layers.0"]}, "did you mean 'layers.0'"),
        ({"every_k": 5}, "`every_k` is 5, but only 4 layers match"),
        ({"mm_shapes_to_save": ["*.upp"]}, "`mm_shapes_to_save` contains '.*upp', which matches"),
        (
            {"mm_shapes_to_recompute": ["*.act"], "policy": "matmuls"},
            "`mm_shapes_to_recompute` contai",
        ),
    ],
)
def test_no_match_is_an_error_and_changes_nothing(options, message):
    model = Model()
    options = {"layer_classes": ["Block"], **options}
    with pytest.raises(ValueError, match=message):
        so.apply_activation_checkpoint(model, Config(**options))
    assert not any(isinstance(m, so.CheckpointWrapper) for m in model.modules())
    if "mm_shapes" not in message:
        model = so.apply_activation_checkpoint(model, Config(**options, allow_no_match=True))
        assert not any(isinstance(m, so.CheckpointWrapper) for m in model.modules())


def test_one_of_several_names_without_a_match_warns():
    with pytest.warns(
        UserWarning, match=r"'LlamaBlock' matches no module .*'blocks.\*' matches no"
    ):
        so.apply_activation_checkpoint(
            Model(), Config(["Block", "LlamaBlock"], layer_names=["blocks.*"])
        )


@pytest.mark.parametrize(
    ("model", "cfg", "message"),
    [
        pytest.param(
            3,
            Config(["Block"]),
            "`model` is 3, a int. Expected a torch.nn.Module",
            id="number as model",
        ),
        pytest.param(
            nn.Linear(2, 2),
            3,
            "`cfg` is 3. Expected an ActivationCheckpointConfig",
            id="number as config",
        ),
        pytest.param(
            torch.jit.script(nn.Linear(2, 2)),
            Config(layer_names=[""]),
            "is a ScriptModule",
            id="ScriptModule",
        ),
    ],
)
def test_wrong_types_of_model_and_config_are_errors(model, cfg, message):
    with pytest.raises(TypeError, match=message):
        so.apply_activation_checkpoint(model, cfg)


@pytest.mark.parametrize("function", [so.remove_activation_checkpoint, so.checkpoint_report])
def test_a_class_instead_of_a_model_is_an_error(function):
    with pytest.raises(TypeError, match=r"`model` is .*Block'>, a type\. Expected a torch"):
        function(Block)


def test_a_mapping_is_accepted_as_config():
    model = so.apply_activation_checkpoint(Model(), {"layer_classes": ["Block"]})
    assert isinstance(model.layers[0], so.CheckpointWrapper)
    with pytest.raises(ValueError, match="unknown key 'layer_clases'"):
        so.apply_activation_checkpoint(Model(), {"layer_clases": ["Block"]})


@pytest.mark.parametrize(
    "how", [{}, {"mode": "output_discard"}, {"policy": "matmuls"}, {"use_reentrant": True}]
)
def test_a_forward_that_was_set_on_the_instance_is_checkpointed_and_put_back(how):
    """torchtitan's `parallelize` sets such a forward, and applies checkpoints later."""

    def model():
        torch.manual_seed(0)
        model = Model().double()
        for block in model.layers:
            block.forward = lambda x, scale=2.0, own=block.forward: 3 * own(x / 3, scale)
        return model

    def gradients(model):
        torch.manual_seed(1)
        x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
        model(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    ours, plain = model(), model()
    forwards = [block.forward for block in ours.layers]
    so.apply_activation_checkpoint(ours, Config(["Block"], **how))
    calls = []
    ours.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert all(map(torch.equal, gradients(ours), gradients(plain)))
    assert len(calls) == 2
    so.remove_activation_checkpoint(ours)
    assert [vars(block)["forward"] for block in ours.layers] == forwards
    assert not any(isinstance(m, so.CheckpointWrapper) for m in ours.modules())
    assert "_own_forward" not in vars(ours.layers[0])


def test_a_forward_that_accelerate_restores_is_refused_and_nothing_changes():
    model = Model()
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model.layers[2], hooks.ModelHook())
    with pytest.raises(
        RuntimeError, match="forward of Block was replaced on the instance by accelerate"
    ):
        so.apply_activation_checkpoint(model, Config(["Block"]))
    assert not any(isinstance(m, so.CheckpointWrapper) for m in model.modules())


def test_a_class_that_cannot_change_is_refused_and_nothing_changes():
    class Odd(Block):
        __slots__ = ("slot",)

    class Stubborn(Block):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise TypeError("no")
            super().__setattr__(name, value)

    model = Model()
    model.layers[3] = Stubborn()
    with pytest.raises(TypeError, match=r"The class of Stubborn cannot change: no\. Expected"):
        so.apply_activation_checkpoint(model, Config(["Block", "Stubborn"]))
    assert not any(isinstance(m, so.CheckpointWrapper) for m in model.modules())
    x = make_input()
    odd = so.CheckpointWrapper(Odd().double())
    odd.slot = 3
    step(odd, x)


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        refused(TypeError, "`module` is 3, a int. Expected a torch.nn.Module", 3),
        refused(ValueError, "needs the module around this one", None, mode="output_discard"),
        refused(ValueError, "`every_k` selects layers of a model", None, every_k=2),
        refused(ValueError, "`layer_classes` selects layers", None, layer_classes=["Block"]),
        refused(ValueError, "unknown key 'ops'. Did you mean", None, ops=[]),
        refused(ValueError, "Did you mean aten.mm", None, ops_to_save=["aten.mmm"]),
    ],
)
def test_wrong_arguments_of_the_wrapper(module, options, error, message):
    block = Block() if module is None else module
    with pytest.raises(error, match=message):
        so.CheckpointWrapper(block, **options)
    assert not isinstance(block, so.CheckpointWrapper)


def test_the_wrapper_is_the_module_itself():
    block, x = Block().double(), make_input()
    keys, right = list(block.state_dict()), step(block, x)
    wrapped = so.CheckpointWrapper(module=block, use_reentrant=False, ops_to_save=["aten.mm"])
    assert wrapped is block and list(wrapped.state_dict()) == keys
    got = step(wrapped, x)
    assert torch.equal(got[1]["x"], right[1]["x"]) and got[3]["gelu"] > right[3]["gelu"]
    assert so.CheckpointWrapper(wrapped, ops_to_save=["aten.mm"]) is block
    with pytest.raises(RuntimeError, match="Block is checkpointed already"):
        so.CheckpointWrapper(wrapped)
    assert type(so.remove_activation_checkpoint(wrapped)) is Block


def test_reentrant_without_an_input_that_needs_grad_is_an_error():
    block = so.CheckpointWrapper(Block(), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"no input of Block needs grad.*use_reentrant=False"):
        block(torch.randn(2, 6, 16))
    with torch.no_grad():
        block(torch.randn(2, 6, 16))
    assert not block.requires_grad_(False)(torch.randn(2, 6, 16)).requires_grad
