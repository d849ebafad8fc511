"""Compiled steps in which the logits exist in chunks only, whatever the loss.

The idea: label one dimension, take the upstream gradient for 1, run the span once per chunk.

A product by the vocabulary *amplifies*: its result, the logits, is larger than its input. Nothing
that is made of the logits needs all of them at once, for each token is by itself until a sum. So::

    Dynamo graph -> recognise the forward loss -> the op (its autograd is its own)
                 \\-> AOT joint graph -> label -> span -> body -> chunk op        (what is none)

Before autograd a loss stands as it was written. `recognise` looks whether the few numbers per
token that it is made of are those of linear cross-entropy, which has an op of its own::

    for product in the largest products of Dynamo's graph:
        forward = trace(what lies between product and a few numbers per token)    # forward
        form it in the ranges of tokens that are sliced or masked after it        # ranges
        head, tail = logits -> these numbers, those -> the loss
        if head is (lse - z_t, lse, entropy, ...) on random tokens:               # head
            if tail is linear in them:                                            # tail, emit
                loss = linear_cross_entropy(x, w, t, token_weight=gradient of tail) + tail(0)
            else:
                the numbers are the op's, with a gradient each; the tail stays the user's code

Every other loss is chunked in the joint graph of forward and backward::

    for amplifier in the largest products, and spread gradients:   # driver
        write ops without a rule as ops that have one              # prepare, reductions
        reorder targets where a token is a few numbers             # reordered
        put the classes into the last dimension                    # class_dimension
        form it in the ranges of tokens that are sliced after it,  # selections, token_ranges,
            or of the tokens that a mask keeps                     # ranges
        for each range:
            span = label(amplifier): for each node after it        # spans, by the table in rules
                Rows: a slice of it belongs to a chunk of tokens   # lattice
                Partial: each chunk has a term of a sum
                Whole: the same for all chunks; it stays outside
            a few numbers per token that nothing large of the same pass reads leave the span
            gradients = upstream * f(tokens): take upstream for 1  # passes, by the laws in rules
                several upstream gradients, or one per token:
                form the logits once more in the backward
            body = the nodes of the span, for one chunk            # body
            replace the span by one op that runs the body          # rewrite, program
        add up in one place what ops add to the same gradient      # joint_sums
    at run time, for each chunk:                                   # chunk_op
        form the product in a buffer, run the compiled body on it,
        put rows in their place, add terms up                      # assemble
    multiply the gradients by upstream

Terms:
    amplifier: a matrix product whose result is larger than its left factor.
    span: the nodes that are evaluated once per chunk.
    rows: the dimensions of a value that are its tokens.
    group: tokens that an op mixes, such as a sequence; a chunk takes whole groups.
    range: tokens that follow each other, such as the chosen half of a batch; in all that is large
        they are formed, and chunked, by themselves. Those that a mask keeps count as the first.
    wide: what has many numbers for each token, more than a quarter of the vocabulary.
    pass: one way through all tokens; the next one can read sums of those before.
    spread: an upstream gradient expanded or scattered over the logits, which no product leads to.
    degree: 1 for what is proportional to the upstream gradient, 0 for what does not depend on it.
    waiting: factors of a gradient lie in its memory until all are there (`assemble.Waiting`).

A loss in a graph that is traced already, forward and backward, is not recognised: `chunk` on such a
graph chunks it like any other.

`edit` adds nodes to graphs, orders them and undoes changes; `values` is what is asked of a node;
`predict` is the peak of a graph; `op_plan` the op's tiles; `backend` and `explain` are for users,
and `inductor` keeps clear of what Inductor gets wrong.
"""

from storage_ops.autochunk.backend import chunk
from storage_ops.autochunk.explain import Explanation, explain
from storage_ops.autochunk.reasons import ChunkError

__all__ = ["ChunkError", "Explanation", "chunk", "explain"]
