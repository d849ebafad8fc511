"""Checkpointing: regions whose output is freed too, and layers of a model chosen by a config.

A *region* is one call that can be repeated in backward (`region.py`). Its *inputs* are kept as
autograd keeps tensors (`inputs.py`). What it depends on besides is found by following what its code
names (`reachable.py`): random numbers, settings and Python modes, which are those of the forward
again (`execution.py`, `modes.py`), hooks of modules (`calls.py`), and places that it may write,
whose contents are what the forward found and afterwards what it left (`effects.py`, with
`contents.py` for bytes, `places.py` for attributes and items, and `containers.py`). The names in
its code tell whether it may write a tensor (`code_writes.py`). A write that cannot be repeated is
left out or refused (`repeated_writes.py`). What it saves the second time is compared with the first
(`saved.py`, `versions.py`, `op_log.py`).

A region that discards frees the *outputs* that it made (`made.py`) once their *consumers* have run.
Consumers are found by what they saved (`consumers.py`); who else holds an output is counted, and
then it is kept (`holders.py`). `output_discard.py` and `chain.py` are the API on that,
`discard_scope.py` is that of a module around layers, `rows.py` keeps outputs that are not worth
freeing, `guard.py` and `makers.py` know discarded storages. The recompute of a region comes before
the backward of its module, and on other ranks as well: `fsdp.py` gathers parameters for it,
`collectives.py` tells whether others take part in it.

Layers are modules of another class (`wrapper.py`), chosen by `config.py` and `transform.py`; what a
policy saves in them is in `policies.py` and `selective.py`, with `config_policy.py` and
`op_names.py`; `matching.py` finds it again in the recompute. What it *offloads* waits in host
memory (`offload.py`), carried by *copies* of a GPU, of a simulation or of a link that a CPU
simulates (`copies.py`). Tiles are in `tile.py` and `tile_run.py`. `reentrant.py` is the checkpoint
of older torch on the same parts. `report.py` and `explain_policy.py` count; `unchanged.py` puts
back what modules hold after that, and after the simulations of `memory`. Where a region cannot be
repeated, in compiled and traced code, it becomes a mark in the graph (`lowering.py`). `options.py`
has the types of keyword arguments.
"""
