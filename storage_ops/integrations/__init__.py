"""Support for models of other libraries. Importing this package imports none of them.

`transformers.py` patches a Hugging Face causal language model. The model's own forward runs. If it
gets labels, its output layer returns *deferred logits* (`deferred_logits.py`). These record the
operations of the model, or of its caller, until a cross-entropy of them becomes
`linear_cross_entropy`. `deferred_tokens.py` has operations on their tokens, and
`deferred_entropy.py` their entropy. `deferred_forward.py` has the state of one such forward.
`patched_model.py` has the patched forward, and `fused_head.py` the forward for trainers of TRL.
`patched_class.py` has the class of patched models, which watches for forwards that are set later.
`output_layers.py` finds out which output layers are supported. FSDP2 gathers the weight of some
(`gathered_head.py`). Layers that are more than a weight and a bias run on pieces of the tokens
(`head_loss.py`). `patch_probe.py` finds, at patch time, the operations that a model's first forward
would refuse.

`fit_callbacks.py` has callbacks of trainers that apply a plan of `fit`. `first_batch.py` compares
the first batch with that of the plan. Creating a callback imports its library.
"""

from storage_ops.integrations.fit_callbacks import lightning_callback, trainer_callback

__all__ = ["lightning_callback", "trainer_callback"]
