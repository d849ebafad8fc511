"""Losses of preference learning, reinforcement learning and distillation, from hidden states.

Each is a short function on `linear_cross_entropy` or `linear_kl_div`, so no logits are in memory.
Its docstring has the formula, and the paper of the formula.

Terms:

* A *policy* is `input` and `linear_weight`: hidden states and the head. Its *reference* is frozen.
  It is given by hidden states and a head, by log-probabilities, or not at all.
* A *sequence* is one row of `input` (S, T, D), or with `cu_seqlens` a part of packed `input`
  (N, D) or (1, N, D). With *pairs*, the first half of the sequences are the chosen ones, and the
  second half the rejected ones, in the same order. One pass works on all.
* The *completion* is the tokens whose target is not `ignore_index`. Prompts and padding have
  `ignore_index` as targets.
* A token's *log-probability* is the log-probability of its target. With `shift` the token at
  position i is scored with target i + 1, which belongs to the same sequence, as causal language
  models are trained.

Where things are: `sequences` scores tokens and adds up sequences. `preference` has losses with a
reference, of pairs and of judged sequences. `reference_free` has losses of pairs without a
reference. `pairs` has the formulas of pairs. `policy` has the losses of rewarded samples, with
their formulas in `surrogates`. `supervised` has the losses of targets and teachers. `options` has
the types of their keyword arguments.
"""

from storage_ops.losses.policy import dapo, dr_grpo, grpo, gspo
from storage_ops.losses.preference import dpo, kto
from storage_ops.losses.reference_free import cpo, orpo, simpo
from storage_ops.losses.supervised import kd, sft

__all__ = ["cpo", "dapo", "dpo", "dr_grpo", "grpo", "gspo", "kd", "kto", "orpo", "sft", "simpo"]
