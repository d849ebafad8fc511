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


def problem_on_rank(call):
    tokens = tokens_of(call, ranks_of(""), 0, len(call.weight))
    return problem_of(call, tokens, V)


def test_one_plan_with_copies_of_values_per_class():
    """A plan of other chunks on one rank would leave the others waiting."""
    x, q = torch.randn(2, N, D), torch.rand(2, N + 1, V)
    calls = {
        "class weights": lambda n: Call(
            x, torch.randn(n, D), torch.randint(V, (2, N)), class_weight=torch.rand(n).double()
        ),
        "bias": lambda n: Call(
            x.bfloat16(), torch.randn(n, D).bfloat16(), torch.randint(V, (2, N)),
            torch.randn(n).bfloat16(), logits_dtype=torch.float32,
        ),
        "weight": lambda n: Call(x, torch.randn(n, 2 * D)[:, ::2], torch.randint(V, (2, N))),
        "distributions": lambda n: Call(x, torch.randn(n, D), q[:, :-1, :n]),
        "transposed": lambda n: Call(x[0], torch.randn(n, D), torch.rand(V, N).T[:, :n]),
    }  # fmt: skip
    for name, call in calls.items():
        problems = [problem_on_rank(call(n)) for n in (1, 2, V)]
        assert problems[0] == problems[1] == problems[2], name
        assert problems[0].fixed_bytes + problems[0].cast_bytes > 0, name


@pytest.mark.parametrize("copied", ["weight", "bias"])
def test_one_plan_with_copies_of_a_teacher(copied):
    def problems(n):
        teacher, head = torch.randn(N, D).bfloat16(), torch.randn(n, 2 * D).bfloat16()
        head, bias = (head[:, ::2], None) if copied == "weight" else (head[:, :D], head[:, 0])
        call = DivergenceCall(
            torch.randn(N, D), torch.randn(n, D), teacher, head, teacher_bias=bias
        )
        student = Head.of(call.as_loss(), compare=False)
        student.problem = dataclasses.replace(student.problem, vocab=V)
        return DivergenceRows(call, student, None).problem()

    assert problems(2) == problems(V)
    assert problems(2)[0].fixed_bytes > 0
