"""Every op of storage_ops, one line each: the op table.

Schemas live in Python so that the ops, their fakes and their plain-torch fallbacks exist even where
no native library loads. Kernels attach themselves to these names when a library is loaded.
"""

import torch

# name -> schema. A leading underscore marks an op that only this package calls.
SCHEMAS: dict[str, str] = {
    "discard_storage": "(Tensor(a!) self) -> ()",
    "share_storage": "(Tensor(a!) dst, Tensor src) -> ()",
    "_is_discarded": "(Tensor self) -> bool",
    "_arm_guard": "(Tensor self, str message) -> bool",
    "_record_stream": "(Tensor self, int id, int device_index, int device_type) -> ()",
    "_alias_bytes": "(Tensor owner) -> Tensor",
    "_cross_entropy_rows": (
        "(Tensor(a!) logits, Tensor target, Tensor? bias, Tensor? weight, Tensor? upstream, "
        "Tensor(b!) state, Tensor(c!)? argmax, int first_column, int vocabulary, "
        "int ignore_index, float softcap, float logit_scale, float label_smoothing, int phases) "
        "-> ()"
    ),
}

library = torch.library.Library("storage_ops", "DEF")

for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)
