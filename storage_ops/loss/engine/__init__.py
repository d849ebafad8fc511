"""The engine of heads: it walks the tiles of a schedule for cross-entropy and for divergences.

    Call --> Head.of --> Head ------.
             Schedule (../planning) --> Run --- steps ---> Matmul (storage_ops/matmul)
             RowFunction -----------'       |-----------> RowFunction.work on a tile of logits
                                            `-----------> Sums of the gradients

* `head.Head` has the operands of a call. `tokens.Tokens` are its input rows and targets, flattened,
  shifted, and without ignored tokens.
* `run.Run` carries out the steps of a schedule. `run.RowFunction` is what a head computes from a
  tile. Cross-entropy has one in `../row_function.py`, a divergence in `divergence/row_function.py`.
* `sums.Sums` adds up the gradients of the tiles. With `gradient_tolerance`, `selection` chooses the
  classes that they are multiplied with.
* `autograd` is the backward that ops of heads share: gradients from the forward, or a second pass.
* `ranks` merges over a process group whose ranks have slices of the vocabulary. It also decides
  whether a call is one op or the ops that it consists of.
* `kept` holds tiles that stay in memory between a forward and its backward.
"""
