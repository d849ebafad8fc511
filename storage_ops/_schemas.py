"""Every op of storage_ops, one line each: the op table.

Schemas are in Python so that the ops, their fakes and their plain-torch fallbacks exist even if no
native library loads. A library registers its kernels under these names when it is loaded.
"""

import torch

_LOSS_ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    "Tensor? token_weight, Tensor? accumulate_into, str reduction, int ignore_index, "
    "float label_smoothing, float z_loss, float softcap, float logit_scale, SymInt shift, "
    "SymInt? max_valid, ScalarType? accumulate_dtype, SymInt? memory_budget, str plan, str group, "
    "bool in_forward, bool[3] grad_mask, bool[4] wants, int? valid_classes=None, "
    "str input_grad='replicate', bool check_ranks=False, Tensor? divisor=None, "
    "ScalarType? logits_dtype=None, Tensor? selected_ids=None, SymInt top_k=0, "
    "float gradient_tolerance=0.0, float? max_classes=None, bool want_dropped=False"
)

_LOSS_RESULTS = (
    "(Tensor loss, Tensor nll, Tensor lse, Tensor entropy, Tensor picked, Tensor argmax, "
    "Tensor top_ids, Tensor dropped, Tensor state, Tensor grad_input, Tensor grad_weight, "
    "Tensor grad_bias)"
)

_LOSS_UPSTREAM = (
    "Tensor? grad_loss, Tensor? grad_nll, Tensor? grad_lse, Tensor? grad_entropy, "
    "Tensor? grad_picked, Tensor state"
)

# `kept`, `parked`: tensors that a forward without gradients has returned in place of grad_input and
# grad_weight. If grad_weight is empty, it is in the memory of `parked`.
_LOSS_BACKWARD = f"{_LOSS_UPSTREAM}, {_LOSS_ARGUMENTS.replace('Tensor? accumulate_into, ', '')}"
_LOSS_INTO = f"{_LOSS_UPSTREAM}, {_LOSS_ARGUMENTS.replace('Tensor? acc', 'Tensor(a!) acc')}"
_LOSS_GRADIENTS = "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"

_KL_ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor? teacher_input, Tensor? teacher_weight, "
    "Tensor? linear_bias, Tensor? teacher_bias, Tensor? token_weight, Tensor? log_probs, "
    "Tensor? ids, str divergence, float beta, float temperature, float softcap, "
    "float teacher_softcap, bool tail, str reduction, bool shift, int? valid_classes, "
    "SymInt? max_valid, SymInt? memory_budget, str group, bool in_forward, "
    "bool[3] grad_mask, Tensor? target=None, float target_weight=0.0, "
    "float gradient_tolerance=0.0"
)

# Maps names to schemas. A leading underscore marks an op that only this package calls.
SCHEMAS: dict[str, str] = {
    "discard_storage": "(Tensor(a!) self, str? guard=None, bool allow_external=False) -> ()",
    "share_storage": "(Tensor(a!) dst, Tensor src, bool allow_external=False) -> ()",
    "_is_discarded": "(Tensor self) -> bool",
    "_check_storage": "(Tensor self, Tensor? src, bool allow_external=False) -> ()",
    "_record_stream": "(Tensor self, int id, int device_index, int device_type) -> ()",
    "_alias_bytes": "(Tensor owner) -> Tensor",
    "_cross_entropy_rows": (
        "(Tensor(a!) logits, Tensor target, Tensor? bias, Tensor? weight, Tensor? upstream, "
        "Tensor(b!) state, Tensor(c!)? argmax, int first_column, int vocabulary, "
        "int ignore_index, float softcap, float logit_scale, float label_smoothing, int phases) "
        "-> ()"
    ),
    "_tile_sums": (
        "(Tensor(a!) out, Tensor tile, Tensor? lse, Tensor? row_weight, Tensor? bias, "
        "Tensor? bucket, float softcap, float logit_scale, bool absolute=False, "
        "bool slope=False) -> ()"
    ),
    "_gather_gradient": (
        "(Tensor(a!) out, Tensor(b!)? sums, Tensor tile, Tensor tokens, Tensor start, "
        "Tensor count, Tensor? lse, Tensor? factor, Tensor? target, Tensor? hit, Tensor? bias, "
        "float softcap, float logit_scale) -> ()"
    ),
    "_put_rows": "(Tensor(a!) out, Tensor rows, Tensor part, bool add) -> ()",
    "_product": "(Tensor(a!) out, Tensor left, Tensor right, Tensor(b!) scratch, bool add) -> ()",
    "_transposed_product": (
        "(Tensor(a!) out, Tensor(b!) left, Tensor right, Tensor(c!) scratch, bool add) -> ()"
    ),
    "_product_scratch": (
        "(int rows, int columns, int depth, int threads, bool rounded, bool direct) -> (int, int)"
    ),
    "_product_kind": "() -> (str, int)",
    "_scale": "(Tensor(a!) self, Tensor factor) -> ()",
    "_connect": "(Tensor upstream, Tensor[] sources) -> Tensor",
    "_check_ranks": (
        "(Tensor every, int[] assumed, str group, int[] like, bool every_time) -> Tensor"
    ),
    "linear_cross_entropy": f"({_LOSS_ARGUMENTS}) -> {_LOSS_RESULTS}",
    "linear_cross_entropy_backward": f"({_LOSS_BACKWARD}) -> {_LOSS_GRADIENTS}",
    "linear_cross_entropy_backward_kept": (
        f"(Tensor(a!) kept, Tensor(b!)? parked, {_LOSS_BACKWARD}) -> {_LOSS_GRADIENTS}"
    ),
    "linear_cross_entropy_backward_target": f"({_LOSS_BACKWARD}) -> Tensor",
    "linear_cross_entropy_backward_into": (
        f"({_LOSS_INTO}) -> (Tensor grad_input, Tensor grad_bias)"
    ),
    "linear_cross_entropy_backward_into_kept": (
        f"(Tensor(b!) kept, {_LOSS_INTO}) -> (Tensor grad_input, Tensor grad_bias)"
    ),
    "_divergence_rows": (
        "(Tensor(a!) logits, Tensor(d!) teacher, Tensor? bias, Tensor? teacher_bias, "
        "Tensor(b!) state, Tensor(c!) loss, Tensor? upstream, str divergence, float beta, "
        "float scale, int phases, bool over_teacher) -> ()"
    ),
    "linear_kl_div": (
        f"({_KL_ARGUMENTS}) -> (Tensor loss, Tensor state, Tensor grad_input, Tensor grad_weight, "
        "Tensor grad_bias)"
    ),
    "linear_kl_div_backward": (
        f"(Tensor grad_loss, Tensor state, {_KL_ARGUMENTS}) "
        "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
    ),
    "_chunked_span": (
        "(Tensor[] inputs, SymInt[] ints, SymInt[] sizes, SymInt[] groups, str program) -> Tensor[]"
    ),
}

library = torch.library.Library("storage_ops", "DEF")

for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)
