"""Shows every op of a function under a policy, its bytes, and whether it is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, SelectiveCheckpointContext

from storage_ops._op_arguments import tensors_in
from storage_ops.checkpoint.layers.config import ActivationCheckpointConfig, PolicyChoice
from storage_ops.checkpoint.layers.config_policy import policy_of
from storage_ops.checkpoint.saved.guard import by_storage
from storage_ops.checkpoint.selective.policies import OFFLOAD, Policy, begin
from storage_ops.checkpoint.selective.selective import saves_result
from storage_ops.foundation.eager import force_eager
from storage_ops.foundation.op_names import Op, name_of, readable
from storage_ops.foundation.ops import Args, Kwargs, flops_of
from storage_ops.quantities import Tabular, metric
from storage_ops.quantities import readable as readable_bytes

if TYPE_CHECKING:
    from storage_ops.tables import Grid


_IN_WORDS: dict[bool | str, tuple[str, str]] = {  # with the colours
    True: ("saved", "green"),
    False: ("recomputed", "yellow"),
    OFFLOAD: ("offloaded", "cyan"),
}


@dataclass
class OpRow:
    """All calls of one op with the same decision.

    Attributes:
        op: the op's name, such as "aten.mm".
        saved: whether the results are saved; otherwise they are recomputed in backward. "offload":
            saved in host memory.
        count: how often it ran.
        nbytes: bytes of its results; 0 for views and in-place ops.
        flops: floating-point operations of matrix products, convolutions and attention; 0 for other
            ops.
        recompute_share: its share of all recomputed FLOPs, from 0 to 1.
    """

    op: str
    saved: bool | str
    count: int = 0
    nbytes: int = 0
    flops: int = 0
    recompute_share: float = 0.0


@dataclass(frozen=True)
class PolicyTable(Tabular):
    """The result of `explain_policy`, which prints as a table. rich renders it in colour.

    Attributes:
        rows: most bytes first.
    """

    rows: tuple[OpRow, ...]

    @property
    def saved_bytes(self) -> int:
        """Return the bytes of all results that are saved on the device."""
        return sum(row.nbytes for row in self.rows if row.saved is True)

    @property
    def flops(self) -> int:
        """The FLOPs of the forward."""
        return sum(row.flops for row in self.rows)

    @property
    def recompute_flops(self) -> int:
        """The FLOPs of all results that are not saved."""
        return sum(row.flops for row in self.rows if not row.saved)

    def __rich__(self) -> Grid:
        from rich.text import Text

        from storage_ops.tables import Grid

        recomputed_share = self.recompute_flops / self.flops if self.flops else 0.0
        rows = [
            (
                row.op,
                str(row.count),
                readable_bytes(row.nbytes),
                Text(*_IN_WORDS[row.saved]),
                metric(row.flops, "") if row.flops else "",
                f"{row.recompute_share:.1%}" if row.recompute_share else "",
            )
            for row in self.rows
        ]
        return Grid(
            "What the policy saves and recomputes",
            ("op", "count", "bytes", "", "FLOPs", "of recompute"),
            rows,
            f"saved: {readable_bytes(self.saved_bytes)}; recomputed: "
            f"{metric(self.recompute_flops, 'FLOP')}, {recomputed_share:.0%} of the forward's "
            f"{metric(self.flops, 'FLOP')}",
            words=("op", ""),
            optional=("of recompute", "FLOPs", "count"),
        )


def explain_policy(
    fn: Callable[..., Any],
    *args: object,
    policy: PolicyChoice | ActivationCheckpointConfig | Mapping[str, Any],
    **kwargs: object,
) -> PolicyTable:
    """Run a function once, and show what a policy would save and recompute.

    Nothing is checkpointed. A result that is not saved counts as recomputed. A real checkpoint
    stops when backward has all tensors that it needs, so it may recompute less. A saved result that
    the function modifies in place counts as recomputed, such as those of `nn.GRU` on a CPU.

    Args:
        fn: a function or module; args and kwargs are passed to it.
        policy: as `ActivationCheckpointConfig.policy`, or such a config, or a mapping of its
            arguments.

    Returns:
        A table with one row for every op and decision. Its numbers are in `rows`, `saved_bytes`,
        `flops` and `recompute_flops`.

    Raises:
        ValueError, TypeError: `policy` is no policy.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU())
        >>> table = storage_ops.explain_policy(mlp, torch.randn(4, 16), policy="matmuls")
        >>> [(row.op, row.saved, row.nbytes, row.flops) for row in table.rows if row.nbytes]
        [('aten.addmm', True, 1024, 8192), ('aten.gelu', False, 1024, 0)]
    """
    if isinstance(policy, Mapping):
        policy = ActivationCheckpointConfig.from_dict(policy)
    if isinstance(policy, ActivationCheckpointConfig):
        cfg = policy
    else:
        cfg = ActivationCheckpointConfig(policy=policy)
    resolved = policy_of(cfg, fn if isinstance(fn, nn.Module) else nn.Module())
    with force_eager(), _Explaining(resolved) as mode:
        fn(*args, **kwargs)
    rows: dict[tuple[str, bool | str], OpRow] = {}
    for call in mode.calls:
        saved = call.saved if call.is_unchanged else False
        row = rows.setdefault((call.op, saved), OpRow(call.op, saved))
        row.count += 1
        row.nbytes += call.nbytes
        row.flops += call.flops
    recomputed = sum(row.flops for row in rows.values() if not row.saved)
    for row in rows.values():
        if recomputed and not row.saved:
            row.recompute_share = row.flops / recomputed
    return PolicyTable(tuple(sorted(rows.values(), key=lambda r: (-r.nbytes, -r.flops, r.op))))


class _Call(NamedTuple):
    op: str
    saved: bool | str
    nbytes: int
    flops: int
    versions: list[tuple[Tensor, int]]  # of saved results and their views

    @property
    def is_unchanged(self) -> bool:
        """Return True if no saved result was modified in place."""
        return all(t._version == version for t, version in self.versions)


class _Explaining(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, policy: Policy | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}  # by the key of the storage
        self._policy = None if policy is None else begin(policy)

    def __torch_dispatch__(
        self, op: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = by_storage(tensors_in((args, kwargs)))
        out = op(*args, **kwargs)
        if op in SAC_IGNORED_OPS:
            return out
        ctx = SelectiveCheckpointContext(is_recompute=False)
        ctx.op_output = out  # torch 2.10 does not set it
        saved: bool | str = self._policy is not None and saves_result(
            self._policy, ctx, op, args, kwargs
        )
        name, nbytes = readable(name_of(op)), 0
        versions: list[tuple[Tensor, int]] = []
        for key, t in by_storage(tensors_in(out)).items():
            if key not in inputs:
                nbytes += t.nbytes
                if saved and not t.is_inference():
                    self._versions[key] = versions
            # A view may have a version counter of its own.
            if key in self._versions:
                self._versions[key].append((t, t._version))
        self.calls.append(_Call(name, saved, nbytes, flops_of(op, args, kwargs, out), versions))
        return out
