"""Rules of this repository: every op is complete, files are short, docstrings run."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import storage_ops
from storage_ops import _autograd, _schemas
from storage_ops.autochunk.runtime import chunk_op as chunks
from storage_ops.divergence import reference as divergence_reference
from storage_ops.divergence import rows
from storage_ops.loss import reference as loss_reference
from storage_ops.loss.engine import ranks
from storage_ops.matmul import reference as products
from storage_ops.storage import reference

from .test_opcheck import CASES

ROOT = Path(__file__).parents[1]
# Ops that exist only with a native library, because plain torch has no equivalent.
NATIVE_ONLY = {"_alias_bytes"}
REFERENCES = {
    "_is_discarded": "is_discarded",
    "_check_storage": "check_storage",
    "_record_stream": "storage_of",
    "_cross_entropy_rows": "cross_entropy_rows",
    "_tile_sums": "tile_sums",
    "_gather_gradient": "gather_gradient",
    "_put_rows": "put_rows",
    "_chunked_span": "chunked_span",
    "_divergence_rows": "divergence_rows",
    "_product": "product",
    "_transposed_product": "transposed_product",
    "_product_scratch": "product_scratch",
    "_product_kind": "product_kind",
    "_scale": "scale",
    "_check_ranks": "check",
    "_connect": "_connect",
    "linear_cross_entropy_backward": "linear_cross_entropy",
    "linear_cross_entropy_backward_kept": "linear_cross_entropy",
    "linear_cross_entropy_backward_into": "linear_cross_entropy",
    "linear_cross_entropy_backward_into_kept": "linear_cross_entropy",
    "linear_cross_entropy_backward_target": "linear_cross_entropy",
    "linear_kl_div_backward": "linear_kl_div",
}
PUBLIC = ["storage_ops"] + [
    f"storage_ops.{name}"
    for name in ("autochunk", "graph", "integrations", "losses", "memory", "policies")
]
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(storage_ops.__path__, "storage_ops.")
    if "__main__" not in name and "_build_info" not in name
]


@pytest.mark.parametrize("name", _schemas.SCHEMAS)
def test_every_schema_has_a_fake_a_reference_and_an_opcheck(name):
    qualified = f"storage_ops::{name}"
    assert CASES[name]
    assert torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel is not None
    if name not in NATIVE_ONLY:
        known = REFERENCES.get(name, name)
        places = (
            _autograd,
            reference,
            loss_reference,
            divergence_reference,
            rows,
            products,
            chunks,
            ranks,
        )
        assert any(hasattr(m, known) for m in places)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has_kernel(qualified, "CompositeExplicitAutograd")


def test_kernels_raise_without_the_place_in_their_source():
    """STD_TORCH_CHECK prefixes the message with the function, file and line."""
    native = [p for p in sources() if p.relative_to(ROOT).parts[0] in ("csrc", "cuda")]
    assert native and not [p.name for p in native if "STD_TORCH_CHECK(" in p.read_text()]


def files(*suffixes):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    names = listed.stdout.split() if listed.returncode == 0 else []
    paths = [ROOT / n for n in names] or list(ROOT.rglob("*"))
    return [p for p in paths if p.suffix in suffixes and p.is_file()]


def sources():
    return files(".py", ".cpp", ".h", ".cu", ".cuh")


def test_no_file_is_longer_than_500_lines():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources()}
    assert lengths and {n: k for n, k in lengths.items() if k > 500} == {}
    assert lengths["setup.py"] <= 200


@pytest.mark.in_turn
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    module = importlib.import_module(name)
    names = {"torch": torch, "storage_ops": storage_ops}
    if name == "storage_ops.measure.plot":
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot

        names["matplotlib"] = matplotlib
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for test in doctest.DocTestFinder().find(module, extraglobs=names):
        if test.examples:
            runner = doctest.DocTestRunner(optionflags=flags)
            runner.run(test)
            assert runner.failures == 0, test.name


def test_every_public_name_is_in_the_file_that_type_checkers_read():
    """`make lint` and `make types` check that file as they would a user's."""
    used = (ROOT / "tests/typed_use.py").read_text()
    for package in PUBLIC:
        module = importlib.import_module(package)
        prefix = package.rpartition(".")[2].replace("storage_ops", "so")
        missing = [n for n in module.__all__ if not re.search(rf"\b{prefix}\.{n}\b", used)]
        assert not missing, package


@pytest.fixture
def run_examples(tmp_path, monkeypatch):
    """Run a page's examples in order. Return their number and the names they define."""
    monkeypatch.chdir(tmp_path)  # some write files
    return _run_examples


def _run_examples(page, most=30):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        assert len(block.splitlines()) <= most
        if "trl." in block and find_spec("trl") is None:
            names["left out"] = block
            continue
        exec(compile(block, page.name, "exec"), names)
    return len(blocks), names


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_changelog_of_the_first_release_is_short():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text[text.index("## 0.1.0") :].splitlines()) <= 60


@pytest.mark.in_turn
def test_the_examples_of_the_readme_run(run_examples):
    count, names = run_examples(ROOT / "README.md", most=12)
    assert count >= 4 and isinstance(names["m"], storage_ops.memory.Measurement)


# A separate test compares the output of traced-steps.md.
@pytest.mark.in_turn
@pytest.mark.parametrize(
    "name",
    [
        "autochunk",
        "checkpointing",
        "how-it-works",
        "index",
        "integrations",
        "largest-that-fits",
        "make-it-fit",
        "who-held-the-memory",
        "will-it-fit",
        "linear-cross-entropy",
        "measuring",
        "preference-rl-and-distillation",
        "storage-ops",
        "tiles",
    ],
)
def test_the_examples_of_a_page_run(name, run_examples):
    count, names = run_examples(ROOT / "docs" / f"{name}.md")
    assert count
    if "left out" in names:
        pytest.skip(
            "no trl, which is not for Python 3.10: its example was not run, all others were"
        )


# Code, sections that benchmarks.report writes, comments and front matter.
NOT_PROSE = re.compile(
    r"```.*?```|<!-- results.*?<!-- end -->|<!--.*?-->|^---\n.*?\n---\n", flags=re.DOTALL
)
SECTIONS = "Args|Attributes|Returns|Raises|Yields|Terms"
SECTION = re.compile(rf"({SECTIONS}):$")


def prose(text):
    """Yield the paragraphs, list items and entries of a text, without code and tables."""
    for paragraph in re.split(r"\n\s*\n", NOT_PROSE.sub("", text)):
        lines = [line for line in paragraph.splitlines() if line.strip()]
        is_code = lines and lines[0].startswith("    ") and not SECTION.match(lines[0])
        if is_code or ">>>" in paragraph:
            continue
        block, entry = list[str](), 4 if lines and SECTION.match(lines[0]) else 0
        for line in lines:
            words, indent = line.strip(), len(line) - len(line.lstrip())
            if words.startswith(("|", "+-")) or SECTION.match(line):
                continue
            if re.match(r"([-*]|\d+\.) |#", words) or (entry and indent <= entry):
                yield " ".join(block)
                block = []
            block.append(words)
        yield " ".join(block)


def long_sentences(text, most=30):
    """Yield the sentences with more words. Code and a quotation count as one word."""
    for block in prose(text):
        plain = re.sub(r"`[^`]*`|\"[^\"]*\"|\]\([^)]*\)|https?://\S+", " code ", block)
        for sentence in re.split(r"(?<=[.!?])[\"')*]*\s", plain):
            if len(re.findall(r"\S*\w\S*", sentence)) > most:
                yield sentence


def test_long_sentences_are_detected():
    words = "one " * 31
    assert len(list(long_sentences(f"{words}. Short.\n\nArgs:\n    x: {words}\n    y: z"))) == 2
    code = f'```\n{words}\n```\n\n    {words}\n\n| {words} |\n\nIt is `{words}` or "{words}".'
    assert list(long_sentences(code)) == []


def prose_of(path):
    """Return the docstrings of a Python file, or the text of a page."""
    if path.suffix == ".md":
        return [path.read_text()]
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    return [ast.get_docstring(node) or "" for node in nodes]


@pytest.mark.in_turn
def test_no_sentence_is_longer_than_30_words():
    paths = [p for p in files(".py", ".md") if not {"tests", "results"} & {*p.parts}]
    long = {
        str(path.relative_to(ROOT)): [s for text in prose_of(path) for s in long_sentences(text)]
        for path in paths
    }
    assert {name: sentences for name, sentences in long.items() if sentences} == {}


def test_sections_of_docstrings_begin_on_separate_lines():
    joined = {
        str(path.relative_to(ROOT)): re.findall(rf"(?m)^ *(?:{SECTIONS}): \S.*", text)
        for path in files(".py")
        for text in ["\n".join(prose_of(path))]
    }
    assert {name: lines for name, lines in joined.items() if lines} == {}


# Functions whose argument is a whole message, unlike `Conflict` and `wrong`, which take parts.
MESSAGES = re.compile(r"\w*(Error|Warning|Exit)|warn|warn_caller|fail|Refused|complain|stop|error")


def text_of(node):
    """Return a text of the source with "…" for values, or None for other expressions."""
    if isinstance(node, ast.JoinedStr):
        return "".join("…" if isinstance(v, ast.FormattedValue) else v.value for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def messages(source):
    """Yield the texts of errors, warnings and complaints of commands in a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if MESSAGES.fullmatch(name):
                prefix = "checkpoint: " * (name == "fail")  # `fail` adds a name
                yield from (prefix + t for a in node.args if " " in (t := text_of(a) or ""))


def faults_of_message(text):
    """Return what is wrong with the form of a message."""
    # A name in front says which function complains. The text may end with a command to copy.
    is_begun = re.match(r"[\w. ]+: |[A-Z`…'-]|\w+[_(.]", text)
    faults = ["begins with a word"] * (not is_begun)
    faults += ["no period"] * (not re.search(r"[.?…'] ?$", text))
    faults += ["not a sentence"] * bool(re.search(r"(^|: |\. )(Of|What|Whether) ", text))
    faults += ["a semicolon before what was expected"] * ("; expected" in text)
    return [*faults, *long_sentences(text)]


def test_faults_of_messages_are_detected():
    source = """raise ValueError(f"`x` is {x}; expected 1"); fail("takes no x. Expected 1.")"""
    first, second = messages(source)
    assert faults_of_message(first) == ["no period", "a semicolon before what was expected"]
    assert first == "`x` is …; expected 1" and faults_of_message(second) == []
    assert faults_of_message("Of x no copy is kept.") == ["not a sentence"]
    assert faults_of_message("expected a tensor.") == ["begins with a word"]


def test_messages_are_sentences():
    package = [p for p in files(".py") if p.is_relative_to(ROOT / "storage_ops")]
    faults = {
        f"{path.relative_to(ROOT)}: {text}": faults
        for path in package
        for text in messages(path.read_text())
        if (faults := faults_of_message(text))
    }
    assert package and faults == {}


def test_every_public_name_has_an_example():
    for name in storage_ops.__all__:
        thing = getattr(storage_ops, name)
        if not (isinstance(thing, type) and issubclass(thing, Exception)) and callable(thing):
            assert ">>>" in (thing.__doc__ or ""), name
