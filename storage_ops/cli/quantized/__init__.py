"""Models of transformers with quantized weights, on the meta device, and LoRA adapters on them.

The libraries that quantize need not be installed: the layers here allocate what theirs do.
`schemes.py` reads `--quantize` and the `quantization_config` of a config.json. `layers.py` has a
layer for each scheme, which holds packed weights and their statistics as frozen parameters, and
takes the memory of dequantizing them in forward and backward. `packed.py` has the layers of GPTQ
and AWQ, and `experts.py` those of experts. `convert.py` puts them in place of a model's own layers,
as transformers does. `adapters.py` adds LoRA by PEFT, as `options.py` reads it.
"""
