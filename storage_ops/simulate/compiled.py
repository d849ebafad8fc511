"""Simulates a loss of `torch.compile(..., backend="storage_ops")` in its compiled form.

The graph of the loss is recorded with tensors of the same sizes, whose bytes are not used. It goes
through the whole backend except Inductor. So the op of linear cross-entropy, and the op that runs a
loss in chunks, are simulated with the memory that they plan. The few numbers per token that
Inductor would fuse are computed op by op.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _python_dispatch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from storage_ops.foundation.tensor_spec import TensorSpec


@dataclass(frozen=True)
class _Leaf:
    """The place of a tensor in the output of a model."""

    index: int


class _Taken(BaseException):
    """Ends a call after its graph was recorded. Not an Exception, so that no code catches it."""


class _Graphs:
    """Calls a loss in its compiled form, with one graph for all equal outputs of a model.

    Attributes:
        largest: bytes of the loss's largest tensor when it runs op by op: its logits.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.largest = 0
        self._known: dict[Any, tuple[Callable[..., Any], list[Any]]] = {}

    def __call__(self, loss: Callable[..., Any], output: object) -> Any:
        """Return the loss of an output, all of it simulated."""
        leaves, tree = tree_flatten(output)
        key = tree, *(_kind(leaf) for leaf in leaves)
        if key not in self._known:
            self._known[key] = self._take(loss, leaves, tree)
        run, inputs = self._known[key]
        results = run(*(leaves[x.index] if isinstance(x, _Leaf) else x for x in inputs))
        return results[0] if len(results) == 1 else results

    def _take(
        self, loss: Callable[..., Any], leaves: list[Any], tree: TreeSpec
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return a function for the graph, and its arguments: leaves, and tensors of the loss."""
        values: list[Any] = []

        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            values_of_nodes = [node.meta.get("example_value") for node in gm.graph.nodes]
            sizes = (t.numel() * t.itemsize for t in values_of_nodes if isinstance(t, Tensor))
            self.largest = max(self.largest, *sizes)
            run = _compiled(gm, examples, self._options)

            def call(*inputs: object) -> Any:
                values.extend((run, inputs))
                raise _Taken

            return call

        def plain(value: object) -> Any:
            return loss(value)

        # The code object is a copy, because Dynamo keeps only a few graphs for the same code.
        fresh = FunctionType(plain.__code__.replace(), globals(), "plain", None, plain.__closure__)
        compiled = torch.compile(fresh, backend=backend, fullgraph=True, dynamic=False)
        with _as_outside(), torch.compiler.set_stance("default"), torch.enable_grad():
            like = [_like(leaf) for leaf in leaves]
            try:
                with contextlib.suppress(_Taken):
                    compiled(tree_unflatten(like, tree))
            except torch._dynamo.exc.Unsupported as error:
                raise RuntimeError(
                    "`loss` is compiled by storage_ops in more than one graph, or not at all. Such "
                    "a loss cannot be simulated. Pass a loss that torch.compile takes with "
                    "fullgraph=True. Or pass the function itself, which is simulated op by op. The "
                    f"error was: {str(error).strip().splitlines()[0]}"
                ) from error
        if not values:
            raise RuntimeError(
                "`loss` is compiled by storage_ops, but torch.compile is switched off or produces "
                "no graph of it. Pass the function itself, which is simulated op by op."
            )
        run, inputs = values
        places = {id(t): _Leaf(i) for i, t in enumerate(like) if isinstance(t, Tensor)}
        return run, [places.get(id(x), x) for x in inputs]


def as_it_runs(loss: Any, memory_budget: int | None = None) -> Any:
    """Return the function to simulate for a loss: a compiled loss in its compiled form.

    Args:
        loss: the loss.
        memory_budget: budget for a compiled loss, in place of the one in its options.
    """
    backend = backend_of(loss)
    if backend is None:
        return loss
    options = backend.kwargs.get("options") or {}
    if memory_budget is not None:
        options = with_budget(options, memory_budget)
    return functools.partial(_Graphs(options), loss._torchdynamo_orig_callable)


def largest_of(loss: Any) -> int:
    """Return the bytes of a compiled loss's logits, once the function of `as_it_runs` has run."""
    graphs: _Graphs = loss.func
    return graphs.largest


def with_budget(options: dict[str, Any], memory_budget: int | None) -> dict[str, Any]:
    """Return options of the backend with another budget. None: with its own choice."""
    rest = {k: v for k, v in options.items() if k not in ("num_chunks", "memory_budget")}
    return rest if memory_budget is None else {**rest, "memory_budget": memory_budget}


def backend_of(loss: object) -> Any:
    """Return the backend "storage_ops" of a compiled loss, or None for any other loss."""
    compiler = _compiler_of(loss)
    return compiler if compiler is not None and compiler.compiler_name == "storage_ops" else None


def _compiler_of(loss: object) -> Any:
    """Return the backend that torch.compile was given for a function or module, or None."""
    if not hasattr(loss, "_torchdynamo_orig_callable"):
        return None
    context = getattr(loss, "dynamo_ctx", None)  # for a module
    cells = getattr(loss, "__closure__", None) or ()
    for compiler in (getattr(context, "callback", None), *(cell.cell_contents for cell in cells)):
        while hasattr(compiler, "_torchdynamo_orig_backend"):
            compiler = compiler._torchdynamo_orig_backend
        if hasattr(compiler, "compiler_name"):
            return compiler
    return None


@contextlib.contextmanager
def _as_outside() -> Iterator[None]:
    """Compile as if outside of the simulation. Dynamo of torch 2.10 checks flags, not modes."""
    module: Any = _python_dispatch
    before = {name: value for name, value in vars(module).items() if name.startswith("_is_in_")}
    with _python_dispatch._disable_current_modes():
        vars(module).update(dict.fromkeys(before, False))
        try:
            yield
        finally:
            vars(module).update(before)


def _kind(value: object) -> TensorSpec | str:
    """Return the properties of an output leaf on which a graph depends."""
    return TensorSpec.of(value) if isinstance(value, Tensor) else repr(value)


def _like(value: object) -> Any:
    if not isinstance(value, Tensor):
        return value
    return TensorSpec.of(value).make().requires_grad_(value.requires_grad)


def _compiled(
    gm: fx.GraphModule, examples: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a graph of Dynamo with the backend, without Inductor."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from storage_ops.autochunk.backend import apply, taken
    from storage_ops.autochunk.cross_entropy.recognise import recognise

    (chunks, budget, strict), _ = taken(options)
    recognised = recognise(gm, chunks, budget)

    def partition(joint: fx.GraphModule, inputs: Sequence[object], **options: Any) -> Any:
        apply(joint.graph, chunks, budget, strict, 1, recognised)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **options)

    make: Any = aot_autograd(
        fw_compiler=_op_by_op, bw_compiler=_op_by_op, partition_fn=partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    compiled_graph: Callable[..., Any] = make(gm, examples)
    return compiled_graph


def _op_by_op(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
    """Return a graph to run unchanged. The bytes of a chunk exist while the chunked op runs."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    from storage_ops.autochunk.analysis.predict import held_inside

    chunked = torch.ops.storage_ops._chunked_span.default
    for node in gm.graph.find_nodes(op="call_function", target=chunked):
        device = node.args[0][0].meta["val"].device
        options = {"dtype": torch.uint8, "device": device}
        with gm.graph.inserting_before(node):
            chunk = gm.graph.call_function(torch.empty, (held_inside(node),), options)
        with gm.graph.inserting_after(node):
            gm.graph.call_function(Tensor.numel, (chunk,))
    gm.recompile()
    boxed: Callable[..., Any] = make_boxed_func(gm.forward)
    return boxed
