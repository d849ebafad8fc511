"""Ranks whose slices of the vocabulary differ in size choose the same plan."""

import dataclasses

import pytest
import torch

from storage_ops.divergence.call import DivergenceCall
from storage_ops.divergence.row_function import DivergenceRows
from storage_ops.loss.call import Call
from storage_ops.loss.engine.head import Head, problem_of
from storage_ops.loss.engine.ranks import ranks_of
from storage_ops.loss.engine.tokens import tokens_of

N, D, V = 12, 8, 40  # V is the most classes of a rank
GROUP = "ranks"  # no collective runs


def problem_on_rank(call):
    tokens = tokens_of(call, ranks_of(""), 0, len(call.weight))
    return problem_of(call, tokens, V)


def with_strides(t):
    """Return an equal tensor whose rows are not contiguous."""
    return torch.stack((t, t), -1)[..., 0]


def test_one_plan_with_copies_of_values_per_class():
    """A plan of other chunks on one rank would leave the others waiting."""
    x, target = torch.randn(2, N, D), torch.randint(V, (2, N))
    calls = {
        "class weights": lambda n: Call(
            x, torch.randn(n, D), target, class_weight=torch.rand(n).double(), group=GROUP
        ),
        "bias": lambda n: Call(
            x.bfloat16(), torch.randn(n, D).bfloat16(), target, torch.randn(n).bfloat16(),
            logits_dtype=torch.float32, group=GROUP,
        ),
    }  # fmt: skip
    for name, call in calls.items():
        problems = [problem_on_rank(call(n)) for n in (1, 2, V)]
        assert problems[0] == problems[1] == problems[2], name
        assert problems[0].fixed_bytes > 0, name


def test_one_plan_with_other_strides():
    """Strides are not compared between ranks, and one rank's copy must not change the plan."""
    x, target, weight = torch.randn(2, N, D), torch.randint(V, (2, N)), torch.randn(V, D)
    bias, class_weight, q = torch.randn(V), torch.rand(V), torch.rand(2, N, V)
    call = Call(x, weight, target, bias, class_weight=class_weight, group=GROUP)
    calls = [(call, name) for name in ("input", "weight", "bias", "class_weight")]
    calls.append((call._replace(target=q, class_weight=None), "target"))
    for one, name in calls:
        other = one._replace(**{name: with_strides(getattr(one, name))})
        assert problem_on_rank(one) == problem_on_rank(other), name
        alone = one._replace(group=""), other._replace(group="")
        assert problem_on_rank(alone[0]) != problem_on_rank(alone[1]), name


@pytest.mark.parametrize("several", [True, False])
def test_one_plan_with_copies_of_a_teacher(several):
    def problem(n, copied):
        teacher, head = torch.randn(N, D), torch.randn(n, D)
        call = DivergenceCall(
            torch.randn(N, D).bfloat16(), torch.randn(n, D).bfloat16(), teacher, head,
            teacher_bias=torch.randn(n).bfloat16(),
        )  # fmt: skip
        for name in copied:
            call = call._replace(**{name: with_strides(getattr(call, name))})
        student = Head.of(call.as_loss(), compare=False)
        student.problem = dataclasses.replace(student.problem, vocab=V)
        student.ranks.several = several
        return DivergenceRows(call, student, None).problem()

    names = ["teacher_input", "teacher_weight", "teacher_bias"]
    for name in names[:2]:
        assert (problem(V, []) == problem(V, [name])) == several, name
    assert problem(2, names) == problem(V, names)
    assert problem(2, [])[0].fixed_bytes > 0
