"""Models of other libraries on the ops of this package; none of the libraries is imported.

`transformers.py` patches a Hugging Face causal language model. The model's own forward runs; while
it is given labels, its output layer returns *deferred logits* (`deferred_logits.py`), which record
what the model, or a caller to whom it returns them, does to them until a cross-entropy of them
becomes `linear_cross_entropy`. `deferred_forward.py` has what is known of one such forward.
`patched_model.py` has that forward, and `fused_head.py` the one that trainers of TRL ask for.
`patched_class.py` has the class of patched models, which watches forwards that are set later.
`output_layers.py` says which layers can; those that are more than a weight and a bias run on pieces
of the tokens (`head_loss.py`). `patch_probe.py` finds when patching what a model would refuse at
its first forward.

`fit_callbacks.py` has callbacks of trainers that apply a plan of `fit`; a library is imported when
a callback for it is made.
"""

from storage_ops.integrations.fit_callbacks import lightning_callback, trainer_callback

__all__ = ["lightning_callback", "trainer_callback"]
