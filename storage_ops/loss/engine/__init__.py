"""The engine of heads: it runs the tiles of a schedule for cross-entropy and for divergences.

    Call --> Head.of --> Head ------.
             Schedule (../planning) --> Run --- steps ---> Matmul (storage_ops/matmul)
             RowFunction -----------'       |-----------> RowFunction.work on a tile of logits
                                            `-----------> Sums of the gradients

* `head.Head` has the operands of a call. `tokens.Tokens` are its input rows and targets, flattened,
  shifted, and without ignored tokens.
* `run.Run` runs the steps of a schedule. `run.RowFunction` is the function that a head computes
  from a tile. Cross-entropy has one in `../row_function.py`, a divergence in
  `divergence/row_function.py`.
* `sums.Sums` adds up the gradients of the tiles. With `gradient_tolerance`, `selection` chooses
  which classes take part in the products.
* `autograd` is the backward that ops of heads share: gradients from the forward, or from a second
  pass.
* `ranks` merges results over a process group whose ranks have slices of the vocabulary. It also
  decides whether a call is one op or several.
* `kept` has the tiles that stay in memory between a forward and its backward.
"""
