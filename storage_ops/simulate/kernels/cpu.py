"""Temporary memory that large CPU kernels allocate while they run.

On Arm, oneDNN multiplies a copy of a float32 weight by Arm's Compute Library. This was observed
with torch 2.13 by allocation events on an emulated aarch64. Copies for 16-bit products on Arm do
not count.

oneDNN runs each layer and direction of an LSTM in float32. Training keeps a workspace for the
backward, with room for the gradients of all states. This was observed on AVX2. oneDNN of torch 2.10
takes up to twice the temporary memory that is counted here.

Fused attention has buffers for a block of scores in each thread (ATen's FlashAttentionKernel.cpp).
The buffers of its 16-bit products do not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from storage_ops.foundation.ops import Args, describe
from storage_ops.matmul import aten
from storage_ops.quantities import next_multiple
from storage_ops.simulate.kernels.fake_tensor_gaps import memory_format_of
from storage_ops.simulate.kernels.scratch import Gradients, Scratch, See, factors_of, see_all

_PAGE = 4096  # bytes
_LARGE_BATCH = (
    128  # from this batch size on, an LSTM computes the gates of each time step separately
)
# Copies of an LSTM's hidden states in its workspace. oneDNN 3.7, of torch 2.10, keeps two more.
_STATES = 5 if torch.__version__.startswith("2.10.") else 3
# Rows of a block of scores, from this length of the queries on.
_ROWS = {768: 256, 192: 64, 0: 32}
_COLUMNS = 512  # most columns of a block


def _product(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    see(out)
    left, right = factors_of(args)
    copies = scratch.for_blas(left, right)
    if aten.has_arm_library() and _is_packed(left, right):
        hidden, classes = right.shape
        scratch.use(right, aten.packed_bytes(classes, hidden))
    scratch.give_back(copies)


def _is_packed(left: Tensor, right: Tensor) -> bool:
    """Return True if Arm's library copies the right operand of a product, as for x @ w.T."""
    return left.dtype == torch.float32 and left.stride(1) == 1 and right.stride(0) == 1


def _batch_norm_backward(scratch: Scratch, args: Args, out: Gradients, see: See) -> None:
    """Allocate the gradient of the input twice if all operands have one memory format."""
    of_x = out[0]
    copies = []
    if of_x is not None:
        input_format = memory_format_of(args[1])
        if all(t.is_contiguous(memory_format=input_format) for t in args[:2]):
            copies = scratch.take(of_x)
    see_all(out, see)
    scratch.give_back(copies)


def _ctc_backward(scratch: Scratch, args: Args, out: Tensor, see: See) -> None:
    """Allocate the backward variables of CTC, which are as large as the forward variables."""
    see(out)
    log_alpha: Tensor = args[6]
    scratch.use(log_alpha, log_alpha.nbytes)


def _padded(size: int) -> int:
    """Return the row length of an LSTM's matrices: whole 64 bytes, no multiple of 256 numbers."""
    length = next_multiple(size, 16)
    return length + 16 if length % 256 == 0 else length


def _pages(*numbers: int) -> int:
    """Return the bytes of float32 matrices, each in whole pages."""
    return sum(next_multiple(4 * n, _PAGE) for n in numbers)


def _lstm_states(x: Tensor, hidden: int) -> tuple[int, int]:
    """Return the number of elements of the hidden and cell states of all time steps."""
    tokens, batch, features = x.shape
    rows = 2 * (tokens + 1) * batch
    return rows * _padded(max(features, hidden)), rows * hidden


def _lstm_step(rows: int, batch: int, hidden: int) -> tuple[int, int]:
    """Return the number of elements of the gates of `rows` rows and the hidden state of a step."""
    return rows * _padded(4 * hidden), batch * _padded(hidden)


def _lstm_result(*args: Any) -> tuple[Tensor, ...]:
    """Return the results of a layer with its workspace, which is empty in torch's fake."""
    output, hy, cy, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*args)
    if torch.is_grad_enabled():
        (tokens, batch, _), hidden = args[0].shape, args[10]
        gates, state = _lstm_step(tokens * batch, tokens * batch, hidden)
        states, cells = _lstm_states(args[0], hidden)
        # States and their gradients: the output, the hidden state and the cell state.
        nbytes = _pages(gates, state, *_STATES * [states], cells, cells)
        workspace = args[0].new_empty(nbytes, dtype=torch.uint8)
    return output, hy, cy, workspace


def _lstm(scratch: Scratch, args: Args, out: tuple[Tensor, ...], see: See) -> None:
    (tokens, batch, features), hidden = args[0].shape, args[10]
    see_all(out, see)
    if torch.is_grad_enabled():
        rows = batch if batch >= _LARGE_BATCH else tokens * batch
        gates, state = _lstm_step(rows, batch, hidden)
        working, width = _pages(gates, state, state), _padded(4 * hidden)
    else:
        working = _pages(*_lstm_states(args[0], hidden), *_lstm_step(batch, batch, hidden))
        width = 4 * next_multiple(hidden, 16)
    scratch.use(args[0], working + _PAGE + 16 * hidden + 4 * (features + hidden) * width)


def _lstm_gradients(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of a layer, whose two biases have one. torch's cached fake has two."""
    gradients = torch.ops.aten.mkldnn_rnn_layer_backward.default(*args)
    return (*gradients[:4], gradients[3], *gradients[5:])


def _lstm_backward(scratch: Scratch, args: Args, out: tuple[Tensor, ...], see: See) -> None:
    x, weights, states, gradients = args[0], args[1:3], args[7:10], args[10:13]
    (tokens, batch, _), hidden = x.shape, args[15]
    copied = [
        state
        for state, grad in zip(states, gradients, strict=True)
        if grad is None or not grad.is_contiguous()
    ]
    copies = [b for t in copied for b in scratch.take_bytes(t, t.numel() * t.itemsize)]
    see_all(out, see)
    nbytes = 0
    for weight in weights:
        rows, columns = weight.shape
        nbytes += 4 * columns * _padded(rows)  # the gradient
        nbytes += 0 if columns == _padded(columns) else 4 * rows * _padded(columns)
    gates, state = _lstm_step(tokens * batch, batch, hidden)
    scratch.use(x, nbytes + _pages(gates, state, state) + _PAGE + 16 * hidden)
    scratch.give_back(copies)


def _attention_block(queries: Tensor, keys: Tensor) -> tuple[int, int]:
    """Return the number of rows and columns of a block of scores."""
    rows = next(rows for least, rows in _ROWS.items() if queries.shape[-2] >= least)
    return rows, min(_COLUMNS, keys.shape[-2])


def _scores_bytes(t: Tensor, elements: int) -> int:
    """Return the bytes of scores, which for 16-bit tensors exist in float32 and in 16 bits."""
    return elements * (t.itemsize if t.itemsize >= 4 else 4 + t.itemsize)


def _attention(scratch: Scratch, args: Args, out: tuple[Tensor, ...], see: See) -> None:
    see_all(out, see)
    queries, keys = args[:2]
    rows, columns = _attention_block(queries, keys)
    sums = rows * (2 + queries.shape[-1])
    nbytes = _scores_bytes(queries, rows * columns) + max(4, queries.itemsize) * sums
    scratch.use(queries, torch.get_num_threads() * nbytes)


def _attention_backward(scratch: Scratch, args: Args, out: tuple[Tensor, ...], see: See) -> None:
    see_all(out, see)
    gradient, queries, keys = args[:3]
    copies = scratch.contiguous(gradient.transpose(1, 2))
    rows, columns = _attention_block(queries, keys)
    nbytes = torch.get_num_threads() * _scores_bytes(queries, 2 * rows * columns)
    scratch.use(queries, nbytes + max(4, queries.itemsize) * rows)
    scratch.give_back(copies)


describe("_scaled_dot_product_flash_attention_for_cpu.default", scratch_on_cpu=_attention)
describe(
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    scratch_on_cpu=_attention_backward,
)
describe(
    "mkldnn_rnn_layer.default",
    result_on_cpu=_lstm_result,
    scratch_on_cpu=_lstm,
)
describe(
    "mkldnn_rnn_layer_backward.default",
    result_on_cpu=_lstm_gradients,
    scratch_on_cpu=_lstm_backward,
)
describe("_ctc_loss_backward", scratch_on_cpu=_ctc_backward, scratch_on_gpu=_ctc_backward)
describe("mm addmm", scratch_on_cpu=_product)
describe("native_batch_norm_backward batch_norm_backward", scratch_on_cpu=_batch_norm_backward)
