"""Models of transformers with quantized weights, on the meta device, and LoRA adapters on them.

The quantization libraries need not be installed: the layers here allocate the same memory as
theirs. `schemes.py` reads `--quantize` and the `quantization_config` of a config.json. `layers.py`
has a layer for each scheme. It has packed weights and statistics as frozen parameters, and
allocates the memory for dequantizing them in forward and backward. `packed.py` has the layers of
GPTQ and AWQ, and `experts.py` those of experts. `convert.py` replaces a model's own layers by them,
as transformers does. `adapters.py` adds LoRA by PEFT, by the options in `options.py`.
"""
