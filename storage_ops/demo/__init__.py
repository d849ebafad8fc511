"""`python -m storage_ops demo`: train a small GPT twice, without and with storage_ops."""
