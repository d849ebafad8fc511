"""Real text and a byte-pair encoding of it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

MOST_BYTES = 10_000_000


def standard_library_text() -> str:
    """Return source files of the running Python's standard library, up to ten megabytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    pieces, total = [], 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or total >= MOST_BYTES:
            continue
        piece = path.read_text(encoding="utf-8", errors="replace")
        pieces.append(piece)
        total += len(piece)
    return "\n".join(pieces)[:MOST_BYTES]


def encode(text: str, vocab_size: int) -> tuple[torch.Tensor, Tokenizer]:
    """Train a byte-level BPE on a text and encode the text with it.

    Returns:
        The token indices, (tokens,) int64, and the tokenizer.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    encoded = tokenizer.encode_batch_fast(lines)
    return torch.tensor([i for line in encoded for i in line.ids]), tokenizer
