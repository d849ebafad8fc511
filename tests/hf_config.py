"""The config file of a small Llama, for the commands that read one."""

import json


def write(folder, **sizes):
    """Write a config.json with these sizes and two key heads for four query heads."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 4,
        "num_key_value_heads": 2, **sizes,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)
