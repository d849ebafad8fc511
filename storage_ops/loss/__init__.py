"""Linear cross-entropy: the loss of a linear layer's output, computed in tiles of logits.

    api.linear_cross_entropy -> Call -> op -> Run --- steps ---> Matmul (storage_ops/matmul)
                                               |           `---> RowFunction: the row kernel
                                               |           `---> Sums of the gradients
             Head -> Problem -> planning -> Schedule

Terms:

* A *tile* is a block of the logits: rows (tokens) by classes. Nothing larger than the *tile buffer*
  is allocated for them.
* The *row kernel* works on a tile in *phases*. UPDATE merges it into the *state* of its rows, a few
  numbers per token (running maximum, sum of exponentials, ...). GRADIENT overwrites the logits by
  the loss's gradient with respect to them, from the finished state and the rows' *upstream*
  gradients.
* A *step* is one tile and what is done with it, a *schedule* all steps of a call. The three
  *strategies* differ in what is formed again: chunks of tokens with whole rows of logits, slices of
  the vocabulary in two passes, and one pass that rescales. `schedule` says where logits are stored.
* A *plan* is a schedule and its cost. The planner chooses the fastest plan within a budget.
* Gradients are computed *in the forward* if one upstream number scales them, for a mean or a sum.
  Otherwise the forward keeps the state, and the backward computes the logits again.
* *Ranks* share the vocabulary. They merge the state of rows and add up the input's gradient while
  other chunks are multiplied.

Where things are:

* `api` is the public function, `module` the public module, and `positions` the K-dimensional loss.
  `dtensor` turns placements of DTensors into a process group.
* `call` has the arguments: their types, the rules that options obey, and the fields of the op.
  `checks` compares tensors with each other.
* `op` has the ops: kernels, fakes, autograd and vmap. `row_function` computes cross-entropy from a
  tile, and `picked` the log-probabilities of some classes.
* `formulas` has the formulas of a token's loss, `reference` the definition in plain torch.
* `planning/` chooses the tiles, and needs no torch. `engine/` runs the tiles of any head.
"""
