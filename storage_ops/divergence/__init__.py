"""The divergence of a student's head from a frozen teacher's, whose logits exist in tiles only.

    api.linear_kl_div -> DivergenceCall -> op -> Run --- steps ---> DivergenceRows -> rows
                                                  |           `---> Matmul (storage_ops/matmul)
                        Problem -> plan -> Schedule           `---> Sums of the gradients

`Run`, `Schedule`, `Sums` and the backward are those of `storage_ops.loss`, in its folders `engine`
and `planning`. Their notes on tokens, tiles, budgets and gradients that are made in the
forward hold here. `api` is the public function, `call` the arguments of the op, `checks` the rules
of the options and the checks of the tensors. `row_function` has DivergenceRows, `rows` plain torch
on a tile of each head, which a native kernel replaces. These are the differences:

* A step forms a tile of each head: the student's, which the gradient overwrites, and the teacher's.
* *Statistics* are made of whole rows of logits, never of parts: the divergence of a row needs both
  log-sum-exps before anything else. They are three numbers per token: the two log-sum-exps and the
  *center*, the mean under the student of a class's contribution to the gradient.
* *Gradients* follow in the same step, with whole rows (four products of size tokens x D x V). Or
  they follow in slices of the vocabulary (six products), from the statistics and logits that are
  formed again. Slices need no float32 sum of the weight's gradient.
* Each rank has its part of a row's classes, and the row is finished in a step all the same. The
  ranks merge both log-sum-exps, as the loss does, then add up divergence and center.
* *Targets* may be added, whose cross-entropy is made of the same logits of the student. Its
  gradient lies over these, and that of the divergence over the teacher's.
* A stored teacher has the log-probabilities of a few classes. Both heads are then made *coarse*:
  those classes, and one for the rest. Its statistics are the student's coarse logits.
"""
