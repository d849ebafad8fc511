"""`torch.compile(f, backend="storage_ops")`: the auto-chunker, then Inductor."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from storage_ops import matmul
from storage_ops.autochunk.cross_entropy.recognise import NOTHING, Recognised, recognise
from storage_ops.autochunk.driver import Report, chunk_graph
from storage_ops.autochunk.fx_graph.joint_graph import save_random_numbers
from storage_ops.autochunk.fx_graph.nodes import returned
from storage_ops.autochunk.reasons import ChunkError, Messages, log, warn
from storage_ops.autochunk.runtime.inductor import mended
from storage_ops.loss.planning import devices
from storage_ops.quantities import parse_bytes

GraphT = TypeVar("GraphT", bound=fx.GraphModule | fx.Graph)
_reports: ContextVar[list[Report] | None] = ContextVar("reports", default=None)
OPTIONS: dict[str, Any] = {"num_chunks": None, "memory_budget": None, "strict": False}
_PASS, _LATER = "joint_custom_pre_pass", "post_grad_custom_pre_pass"
_LAST = "joint_custom_post_pass"


@contextmanager
def collected() -> Iterator[list[Report]]:
    """Collect the reports about the graphs that are compiled inside a with block."""
    reports: list[Report] = []
    mark = _reports.set(reports)
    try:
        yield reports
    finally:
        _reports.reset(mark)


def checked(
    num_chunks: int | None, memory_budget: int | float | str | None, strict: bool
) -> tuple[int | None, int | None, bool]:
    """Check the options and return them. An error names the wrong option."""
    if num_chunks is not None and (
        isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1
    ):
        kind = ValueError if type(num_chunks) is int else TypeError
        raise kind(f"`num_chunks` is {num_chunks!r}. Expected an int of at least 1, or None.")
    if not isinstance(strict, bool):
        raise TypeError(f"`strict` is {strict!r}. Expected True or False.")
    budget = None if memory_budget is None else parse_bytes(memory_budget, "`memory_budget`")
    return num_chunks, budget, strict


def taken(options: object) -> tuple[tuple[int | None, int | None, bool], dict[str, Any]]:
    """Split the options of `torch.compile` into checked options of `chunk`, and Inductor's.

    Raises:
        TypeError: options that are no mapping of names to values. ValueError: an option that
            neither `chunk` nor Inductor has.
    """
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            f"`options` is {options!r}. Expected a mapping of names to values, or None."
        )
    of_inductor = {name.replace("-", "_"): value for name, value in options.items()}
    own = checked(*(of_inductor.pop(name, default) for name, default in OPTIONS.items()))
    _check_names(of_inductor)
    return own, of_inductor


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise a ValueError for an option that is not one of Inductor's."""
    from torch._inductor import list_options

    known = set(list_options()) if options else set()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"`options` has {name!r}. Expected {', '.join(OPTIONS)}, or an option of Inductor "
                f"(torch._inductor.list_options()).{hint}"
            )


def apply(
    graph: fx.Graph,
    num_chunks: int | None,
    memory_budget: int | None,
    strict: bool,
    visible: int | None = None,
    recognised: Recognised = NOTHING,
    graph_break: str = "",
) -> Report:
    """Chunk a graph in place. If that is not possible, report it, warn or raise an error."""
    report = chunk_graph(graph, num_chunks, memory_budget, visible, recognised)
    if not report.chunked:
        report.reason += graph_break
    reports = _reports.get()
    if reports is not None:
        reports.append(report)
    elif not report.chunked:
        if strict:
            raise ChunkError(
                f"storage_ops.autochunk: the graph is not chunked. Reason: {report.reason}."
            ) from report.error
        warn(report.reason)
    return report


def chunk(
    joint_gm: GraphT,
    *,
    num_chunks: int | None = None,
    memory_budget: int | float | str | None = None,
    strict: bool = False,
) -> GraphT:
    """Evaluate the part of a joint graph around its logits in chunks of tokens, in place.

    Set it as `torch._inductor.config.joint_custom_pre_pass`, or call it on a graph of a whole step,
    forward and backward, from `make_fx` or `storage_ops.graph.trace_step`. In such a graph autograd
    has decomposed the loss. Only `torch.compile(backend="storage_ops")` sees the loss as it was
    written, and replaces linear cross-entropy by its op.

    Args:
        joint_gm: a GraphModule, or its Graph, of ATen ops with their values in `node.meta["val"]`.
        num_chunks: the number of chunks, at most the number of tokens. None: as many as the budget
            needs.
        memory_budget: bytes for a chunk, as a number or text such as "400 MiB". None: a quarter of
            the logits, at least 32 MiB and at most 1 GiB, or 1/32 of a GPU's memory if that is
            more; smaller logits stay whole.
        strict: raise an error if the graph cannot be chunked. Otherwise warn, and leave it
            unchanged.

    Returns:
        joint_gm.

    Raises:
        ChunkError: with strict, the reason why the graph cannot be chunked.
        TypeError, ValueError: an option of the wrong type or value; a graph without values.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def step(x, w):
        ...     logits = x @ w.t()
        ...     p = torch.softmax(logits, -1)
        ...     d = p * (2 * p - 2 * (p * p).sum(-1, keepdim=True))
        ...     return (p * p).sum(), d @ w, d.t() @ x
        >>> x, w = torch.randn(64, 8), torch.randn(500, 8)
        >>> gm = make_fx(step, tracing_mode="fake")(x, w)
        >>> gm = storage_ops.autochunk.chunk(gm, num_chunks=4, strict=True)
        >>> torch.allclose(gm(x, w)[0], step(x, w)[0])
        True

        A traced step, forward and backward:

        >>> head, h = torch.nn.Linear(8, 500), torch.randn(64, 8)
        >>> def train(h):
        ...     loss = torch.softmax(head(h), -1).square().sum()
        ...     loss.backward()
        ...     return loss.detach()
        >>> step = storage_ops.graph.trace_step(train, h)
        >>> before = step.peak.peak_bytes
        >>> gm = storage_ops.autochunk.chunk(step.gm, num_chunks=4, strict=True)
        >>> step.peak.peak_bytes < before / 2
        True
    """
    options = checked(num_chunks, memory_budget, strict)
    if not isinstance(joint_gm, (fx.GraphModule, fx.Graph)):
        raise TypeError(
            f"`joint_gm` is a {type(joint_gm).__name__}. Expected a torch.fx.GraphModule, such as "
            "`gm` of a traced step, or its graph."
        )
    if isinstance(joint_gm, fx.GraphModule):
        _with_values(joint_gm)
    apply(joint_gm.graph if isinstance(joint_gm, fx.GraphModule) else joint_gm, *options)
    if isinstance(joint_gm, fx.GraphModule):
        joint_gm.recompile()
    return joint_gm


def _with_values(gm: fx.GraphModule) -> None:
    """Set the values of all nodes in one fake mode, if the trace left none or used several modes.

    Raises:
        ValueError: the graph was traced without values.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    missing = [n for n in inputs if "val" not in n.meta]
    if missing:
        raise ValueError(
            f"`joint_gm` has no value for its input {missing[0]}. Expected node.meta['val'], as "
            "make_fx sets it."
        )
    values = [n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    modes = {id(getattr(v, "fake_mode", None)) for v in values}
    if len(modes) < 2 and all(hasattr(v, "fake_mode") for v in values):
        return
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fresh = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor) else v
            for v in (n.meta["val"] for n in inputs)
        ]  # fmt: skip
    with unset_fake_temporarily():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fresh)


@functools.cache
def _source_hash() -> str:
    """Return a hash of the package's code, so that caches never return graphs of other versions."""
    text = b"".join(p.read_bytes() for p in sorted(Path(__file__).parents[1].rglob("*.py")))
    return hashlib.sha256(text).hexdigest()


def _circumstances() -> list[Any]:
    """Return other facts that chunks depend on. The op's plan is made for this processor."""
    kinds = [repr(matmul.of(d, "cpu")) for d in (torch.float32, torch.bfloat16, torch.float16)]
    return [devices.named("cpu").name, torch.get_num_threads(), kinds]


def _make_pass(
    options: tuple[int | None, int | None, bool], visible: int,
    recognised: Recognised = NOTHING, messages: Messages | None = None, graph_break: str = "",
) -> Any:  # fmt: skip
    """Return a pass for Inductor's joint graph, with an id that its caches can store."""

    def run(graph: fx.Graph) -> None:
        with (messages or Messages()).collect() as reasons:
            reasons.append(apply(graph, *options, visible, recognised, graph_break).reason)

    def uuid() -> str | None:
        if _reports.get() is not None:
            return None  # a cache would hide the graph from explain
        logs = log.isEnabledFor(logging.DEBUG)  # a cached graph repeats only lines that were logged
        known = options, visible, astuple(recognised), _circumstances(), logs, graph_break
        return f"{_source_hash()}{json.dumps(known)}"

    return _pass(run, uuid)


def _after(earlier: object, last: object) -> Any:
    """Return a pass that runs the user's passes, then `last`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if earlier is None:
        return last
    passes = [*(earlier if isinstance(earlier, (list, tuple)) else [earlier]), last]

    def run(graph: fx.Graph) -> None:
        for graph_pass in passes:
            graph_pass(graph)

    def uuid() -> str | None:
        # A plain function has no id, so Inductor caches nothing, as without this backend.
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in passes]
        return None if None in ids else "".join(map(str, ids))

    return _pass(run, uuid)


def _graph_break(gm: fx.GraphModule) -> str:
    """Return where and why Dynamo's graph ends before the function, or an empty string."""
    end = getattr(gm, "compile_subgraph_reason", None)
    if end is None or not end.graph_break:
        return ""
    said = end.reason.partition("Developer debug context")[0].partition("For more information")[0]
    place = "".join(f" at {at.filename}:{at.lineno}" for at in end.user_stack[-1:])
    return f"; the graph breaks{place}: {textwrap.shorten(said, 400)}"


def _pass(run: Callable[[fx.Graph], None], uuid: Callable[[], str | None]) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            run(graph)

        def uuid(self) -> Any:
            return uuid()

    return Pass()


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph by Inductor, with the logits in chunks. This is the backend "storage_ops".

    Args:
        gm: the graph from Dynamo.
        example_inputs: its inputs.
        options: `num_chunks`, `memory_budget` and `strict` as in `chunk`. All others are
            Inductor's. If the loss becomes the op of linear cross-entropy, its tiles take the
            memory of this many chunks, and there may be more tiles.
        mode: Inductor's mode, as in torch.compile.

    Returns:
        The compiled function.

    Raises:
        ChunkError: with strict, the reason why the graph cannot be chunked.
        TypeError, ValueError: an option of the wrong type or value, or one that neither the backend
            nor Inductor has. The error names the most similar option.

    Example:
        >>> from storage_ops.autochunk.backend import backend
        >>> options = {"num_chunks": 8, "strict": True}
        >>> f = torch.compile(torch.nn.Linear(8, 99), backend=backend, options=options)
    """
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    chosen, inductor_options = taken({} if options is None else options)
    patches = {**(list_mode_options(mode) if mode else {}), **inductor_options}
    visible = len(returned(gm.graph))
    recognised = recognise(gm, chosen[0], chosen[1])
    messages = Messages()
    for name, last in (
        (_PASS, _make_pass(chosen, visible, recognised, messages, _graph_break(gm))),
        (_LAST, _pass(save_random_numbers, lambda: "storage_ops.random_numbers")),
    ):
        patches[name] = _after(patches.get(name, getattr(config, name)), last)
    # If the user has a pass here, cached graphs repeat no messages.
    if patches.get(_LATER, getattr(config, _LATER)) is None:
        patches[_LATER] = _pass(lambda graph: messages.count(), lambda: "storage_ops.autochunk")
    compiled: Any = compile_fx(
        gm, example_inputs, inner_compile=mended()(compile_fx_inner), config_patches=patches
    )
    messages.repeat()
    return compiled  # type: ignore[no-any-return]
