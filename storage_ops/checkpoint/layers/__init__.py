"""Layers of a model that become regions.

`config.py` chooses layers and modes. `config_policy.py` turns chosen ops into a policy.
`transform.py` changes the class of the chosen modules to the class in `wrapper.py`. `tile.py` and
`tile_run.py` run a module on a part of its tokens at a time, which `token_wise.py` checks.
`last_product.py` leaves out a matrix product in backward. `report.py` and `explain_policy.py` count
the tensors that the layers of a model save.
"""
