"""Writes the page of the documentation site with the package's errors by message."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "storage": ("Storage ops", "storage-ops.md"),
    "checkpoint": ("Checkpointing", "checkpointing.md"),
    "loss": ("Linear cross-entropy", "linear-cross-entropy.md"),
    "divergence": ("Divergences", "preference-rl-and-distillation.md"),
    "losses": ("Preference losses, RL and distillation", "preference-rl-and-distillation.md"),
    "autochunk": ("Auto-chunker", "autochunk.md"),
    "graph": ("Traced steps", "traced-steps.md"),
    "measure": ("Measuring memory", "measuring.md"),
    "simulate": ("Simulating memory", "will-it-fit.md"),
    "oom": ("Running out of memory", "who-held-the-memory.md"),
    "fitting": ("fit", "make-it-fit.md"),
    "integrations": ("Integrations", "linear-cross-entropy.md"),
    "cli": ("Commands", "commands.md"),
}
HEAD = """\
# Errors by message

What does this message mean? This page lists every message that the package raises. "…" stands for
a value, so search for the words around it. The sentence after the value says what
was expected, or what to do.
Messages of the installation are on [another page](installing.md#troubleshooting).
"""
# Helpers that build a message from an argument, its value and the expectation.
_WRONG = {"wrong", "_wrong"}
# Helpers that raise the error of a region, or of a module in tiles.
_FAIL = "fail"
# Errors with specific names.
_KINDS = {"Conflict": "declined with a reason", "Refused": "NotImplementedError"}


def on_files(files, config):
    """Add the page. mkdocs calls this."""
    files.append(File.generated(config, "errors.md", content=_page()))
    return files


def _page():
    """Return a section for each part of the package, with an anchor for each message."""
    parts = [HEAD]
    for package, (title, about) in PARTS.items():
        kinds_of = defaultdict(set)
        for path in sorted((ROOT / "storage_ops" / package).rglob("*.py")):
            for kind, message in _messages(ast.parse(path.read_text())):
                if len(re.findall(r"\w+", message)) > 2:
                    kinds_of[message].add(kind)
        parts.append(f"## {title}\n\nDocumentation: [{title}]({about}).\n")
        for message, kinds in sorted(kinds_of.items()):
            anchor = f"{package}-{re.sub(r'[^a-z0-9]+', '-', message.lower()).strip('-')[:80]}"
            link = f"[¶](#{anchor}){{#{anchor} .headerlink title='link to this message'}}"
            parts.append(f"- {', '.join(sorted(kinds))}: `` {message} `` {link}")
        parts.append("")
    return "\n".join(parts)


def _messages(tree):
    """Yield (kind of error, message) for each error that a module raises, or returns to raise."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Raise, ast.Return, ast.Expr)):
            continue
        call = node.exc if isinstance(node, ast.Raise) else node.value
        if not isinstance(call, ast.Call):
            continue
        name, arguments = ast.unparse(call.func), call.args
        if name in _WRONG:
            kinds = [a for a in arguments if ast.unparse(a).endswith("Error")]
            what, value, expected = map(_text, arguments[-3:])
            name, _, verb = what.partition(" ")
            yield (
                ast.unparse(kinds[0]) if kinds else "Error",
                f"`{name}` {verb}{' ' * bool(verb)}{value}. Expected {expected}.",
            )
        elif name == _FAIL:
            kinds = [ast.unparse(a) for a in arguments if ast.unparse(a).endswith("Error")]
            prefix = "tile: … " if len(arguments) > 1 else "checkpoint: "
            yield (
                kinds[0] if kinds else "RuntimeError",
                prefix + max(map(_text, arguments), key=len),
            )
        elif name in _KINDS:
            yield _KINDS[name], _text(arguments[0])
        elif name.endswith("Error") and arguments:
            yield name, _text(arguments[0])


def _text(node):
    """Return the text of an expression, with "…" for parts that are unknown before it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"
