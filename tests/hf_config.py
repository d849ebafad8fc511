"""The config file of a small Llama, for the commands that read one."""

import json


def written(folder, **sizes):
    """The path of a config.json with two heads of keys for four of queries, and these sizes."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 4,
        "num_key_value_heads": 2, **sizes,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)
