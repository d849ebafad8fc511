"""The divergence of a student's head from a frozen teacher's, computed in tiles of logits.

    api.linear_kl_div -> DivergenceCall -> op -> Run --- steps ---> DivergenceRows -> rows
                                                  |           `---> Matmul (storage_ops/matmul)
                        Problem -> plan -> Schedule           `---> Sums of the gradients

`Run`, `Schedule`, `Sums` and the backward are those of `storage_ops.loss`, in its folders `engine`
and `planning`. The notes there on tokens, tiles, budgets and gradients apply here, too. `api` is
the public function, `call` the arguments of the op. `checks` has the rules of the options and the
checks of the tensors. `row_function` has DivergenceRows, and `rows` the row kernel in plain torch,
which a native kernel replaces. `reference` has the definition, and `targets` the cross-entropy of
the student. The differences to `storage_ops.loss` are:

* A step computes two tiles: the student's logits, which the gradient overwrites, and the teacher's.
* *Statistics* need whole rows of logits, because the divergence of a row needs both log-sum-exps
  first. They are three numbers per token: the two log-sum-exps and the *center*, the mean under
  the student of a class's contribution to the gradient.
* *Gradients* follow in the same step, with whole rows (four products of size tokens x D x V). Or
  they follow in slices of the vocabulary (six products), from the statistics and recomputed logits.
* With a process group, each rank has some of the classes, but still computes whole rows in a step.
  The ranks merge both log-sum-exps, as the loss does, then add up divergence and center.
* *Targets* add a cross-entropy, which reads the same logits of the student. Its gradient overwrites
  these logits, and the gradient of the divergence overwrites the teacher's.
* A stored teacher has the log-probabilities of a few classes. Both heads then become *coarse*:
  these classes, and one for the rest. The statistics are the student's coarse logits.
"""
