"""Chunked losses in compiled code: the logits of a step never exist as a whole.

A matrix product with the vocabulary *amplifies*: the logits are larger than the hidden states. No
later op needs all logits at once, because each token is independent until the loss sums over
tokens. So the compiler pass evaluates the logits, the loss and their gradients for one chunk of
tokens after another. The forward does not know the upstream gradient of the loss. Gradients are
linear in it, so the chunks assume that it is 1, and the gradients are multiplied by it afterwards.

A function passes through two graphs of `torch.compile`::

    Dynamo graph -> a cross-entropy loss becomes the op of linear cross-entropy  (cross_entropy/)
    joint graph  -> every other loss is evaluated in chunks                      (driver.py)

Dynamo's graph has the loss as its author wrote it. `cross_entropy/recognise.py` replaces products
of the logits by `linear_cross_entropy`, which is faster than any rewritten loss::

    for product in the largest products of the graph:
        trace from the product to a few numbers per token          # dynamo_slice
        compute it in the ranges of tokens that are used           # prepare/ranges split into
        logits -> numbers per token, and these -> loss  # per_token, reduction if the numbers are
        (lse - z_t, lse, entropy, ...), tested on random tokens:
            if the loss is linear in them:
                loss = linear_cross_entropy(x, w, t, token_weight=...)     # emit
            else:
                the op returns the numbers; the rest is the user's code    # emit

The joint graph of forward and backward has ATen ops. `driver.py` rewrites it::

    for amplifier in the largest products, and spread gradients:
        replace ops without a rule by ops that have one            # prepare/decompose
        move the classes into the last dimension                   # prepare/class_dimension
        compute the product in the ranges of tokens that are used  # prepare/ranges
        for each range:
            span = the nodes after it that work per token          # analysis/spans, by rules
            passes = the order in which chunks give the results    # analysis/passes
            body = the nodes of the span, for one chunk            # rewrite/body
            replace the span by one op that runs the body          # rewrite/replace
        let ops that add to the same gradient share its memory     # rewrite/joint_sums
    at run time, for each chunk:                                   # runtime/chunk_op
        compute the product in a buffer, run the compiled body on it, write rows to their places,
        add terms up                   # runtime/assemble

Where things are, from the lowest to the highest:

* `reasons.py`: the reasons why a graph is not chunked, and their reports to users.
* `fx_graph/`: facts about single nodes, and edits of a graph.
* `runtime/`: the op that processes the tokens chunk by chunk.
* `analysis/`: the layout of each node in a chunk, the order of results, and predicted memory.
* `prepare/`: rewrites that change no value, so that the rules apply.
* `rewrite/`: replaces a span of nodes by the op.
* `cross_entropy/`: losses that have an op of their own.
* `driver.py`, `backend.py`, `explain.py`: the pass, the backend of torch.compile, the report.

Terms:
    amplifier: a matrix product whose result is larger than its left factor.
    span: the nodes that are evaluated once per chunk.
    layout: what a value is to one chunk: some of its rows, a term of a sum, or the whole value.
    rows: the dimensions of a value that are its tokens.
    group: tokens that an op mixes, such as a sequence. A chunk never cuts a group.
    range: consecutive tokens, such as the chosen half of a batch. Each range is chunked by itself.
        The tokens that a mask keeps count as the first range.
    wide: more than a quarter of the vocabulary's numbers for each token.
    pass: one way through all tokens. A later pass can read sums of the passes before it.
    spread: an upstream gradient that is expanded or scattered to the size of the logits.
    degree: 1 for a value proportional to the upstream gradient, 0 for one that is independent.
    waiting: left factors of a weight gradient, stored in its memory until all chunks have run.

A graph that was traced with its backward has no Dynamo graph. `chunk` rewrites it as a joint graph.
"""

from storage_ops.autochunk.backend import chunk
from storage_ops.autochunk.explain import Explanation, explain
from storage_ops.autochunk.reasons import ChunkError

__all__ = ["ChunkError", "Explanation", "chunk", "explain"]
