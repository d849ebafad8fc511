"""Other libraries' models on the ops of this package."""
