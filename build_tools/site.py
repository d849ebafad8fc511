"""Adds to the documentation site the parts outside docs/: README, public names, stored results.

mkdocs calls these hooks. Pages of the repository's root become pages of the site. A link to a file
that is no page points to that file. So each text exists once, and links work in the repository and
on the site. The reference has the docstrings of all names in each package's `__all__`.
"""

import ast
import posixpath
import re
from pathlib import Path, PurePosixPath

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
REFERENCE = {
    "storage_ops": "Functions and classes",
    "storage_ops.memory": "Memory",
    "storage_ops.policies": "Policies",
    "storage_ops.losses": "Losses",
    "storage_ops.autochunk": "Auto-chunker",
    "storage_ops.graph": "Traced steps",
    "storage_ops.graph.regions": "Regions of traced steps",
    "storage_ops.integrations": "Integrations",
}
DEFINED_IN = {"storage_ops.graph.regions": "storage_ops.foundation.regions"}
CODE = re.compile(r"\]\((?:\.\./)*(storage_ops/[\w/]+)\.py\)")  # a file with public names
IMAGE = re.compile(r'<img [^>]*?src="([^"#:]+)[^>]*>')
PHONE = "(max-width: 44.98em)"  # as in docs/site.css
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_URL = re.search(r'^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
# The README has a picture for light and one for dark pages. On the site, addresses that end with
# Material's marks select the picture by the scheme.
README_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)
BY_SCHEME = r"![\2](\3#only-light)![\2](\1#only-dark)"
# PyPI shows the README, whose links to files and pictures are absolute.
ABSOLUTE = re.compile(rf"(?<=\]\(){re.escape(_URL[1])}/(?:blob|raw)/main/")


def on_files(files, config):
    """Add the pages of the root, and the files that pages link to."""
    docs = Path(config.docs_dir).relative_to(ROOT)
    root_pages = {name: _written(name) for name in PAGES}
    documents = files.documentation_pages()
    pages = {f"{docs}/{f.src_uri}": CODE.sub("", f.content_string) for f in documents}
    texts = {**root_pages, **pages}
    linked = {_target(page, link) for page, text in texts.items() for link in LINK.findall(text)}
    for report in [path for path in linked if path.startswith("benchmarks/")]:  # and its pictures
        linked |= {p.relative_to(ROOT).as_posix() for p in (ROOT / report).parent.glob("*.png")}
    for name, text in root_pages.items():
        text = LINK.sub(lambda m, page=name: _on_site(_target(page, m[0]), docs), text)
        files.append(File.generated(config, PAGES[name], content=text))
    for path in sorted(linked - set(PAGES)):
        file = ROOT / path
        if file.is_file() and not path.startswith(f"{docs}/"):
            files.append(File.generated(config, path, abs_src_path=str(file)))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def _written(name):
    """Return a page of the root with links from the root, and a picture for each scheme."""
    return ABSOLUTE.sub("", README_PICTURE.sub(BY_SCHEME, (ROOT / name).read_text()))


def on_page_content(html, page, config, files: Files):
    """Show the narrow variant of a picture on a phone, if there is one."""
    docs = Path(config.docs_dir)

    def with_narrow(match):
        address = posixpath.normpath(posixpath.join("/", page.url, match[1])).lstrip("/")
        narrow = [_narrow(folder / address) for folder in (docs, ROOT)]
        if not any(path.is_file() for path in narrow):
            return match[0]
        source = f'<source media="{PHONE}" srcset="{_narrow(PurePosixPath(match[1]))}">'
        return f"<picture>{source}{match[0]}</picture>"

    return IMAGE.sub(with_narrow, html)


def _narrow(path):
    """Return the path of a picture's narrow variant, with panels below each other."""
    return path.with_stem(f"{path.stem}-narrow")


def on_page_markdown(markdown, page, config, files: Files):
    """Point links out of docs/ to the place of the file by `on_files`."""
    docs = Path(config.docs_dir).relative_to(ROOT)
    if page.file.generated_by:
        return markdown
    markdown = CODE.sub(_in_reference, markdown)
    up = "../" * page.file.src_uri.count("/")
    name = f"{docs}/{page.file.src_uri}"

    def moved(match):
        target = _target(name, match[0])
        return match[0] if target.startswith(f"{docs}/") else up + _on_site(target, docs)

    return LINK.sub(moved, markdown)


def _reference():
    """Return a page of all public names, into which mkdocstrings inserts their docstrings."""
    parts = ["# Reference\n"]
    for package, title in REFERENCE.items():
        parts.append(f"## {title}\n")
        for name, source in _public(package):
            heading = f"heading: {package}.{name}\n      toc_label: {name}"
            parts.append(f"::: {source}.{name}\n    options:\n      {heading}\n")
    return "\n".join(parts)


def _public(package):
    """Return functions and classes in a package's `__all__`, with the modules that define them."""
    package = DEFINED_IN.get(package, package)
    folder = ROOT / package.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    tree = ast.parse(path.read_text())
    sources = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module not in ("storage_ops", package):
            sources |= {a.asname or a.name: node.module for a in node.names}
        elif isinstance(node, ast.FunctionDef):
            sources[node.name] = package
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return [(n, sources[n]) for n in names if n in sources]  # the others are modules


def _in_reference(match):
    """Return the link to a file's last public name in the reference, for a link to the file.

    Functions come last.
    """
    module = match[1].replace("/", ".")
    names = [n for package in REFERENCE for n, source in _public(package) if source == module]
    return f"](reference.md#{module}.{names[-1]})"


def _target(page, link):
    """Return the path from the root of the file that a page links to."""
    path = (ROOT / page).parent / link
    return path.resolve().relative_to(ROOT).as_posix()


def _on_site(path, docs):
    """Return the path on the site of a file of the repository."""
    return PAGES.get(path, path.removeprefix(f"{docs}/"))


class Docstrings(griffe.Extension):
    """Rewrites docstrings for griffe.

    griffe shows only "Examples:" as code, and accepts only one name or one error in a line.
    """

    def on_object(self, *, obj, **kwargs):
        """Rewrite the docstring of a documented object."""
        if obj.docstring:
            obj.docstring.value = spelled_out(obj.docstring.value)


def spelled_out(text):
    """Return a docstring with a separate entry for each of several names, and for each error."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    parts = re.split(r"^(\w+:)$", text, flags=re.MULTILINE)
    for i in range(1, len(parts), 2):
        if parts[i] == "Raises:":
            parts[i + 1] = re.sub(rf"\.\s+(?={_ERRORS}: )", ".\n    ", parts[i + 1])
        if parts[i] in ("Args:", "Attributes:", "Raises:"):
            parts[i + 1] = re.sub(_SEVERAL, _each_alone, parts[i + 1], flags=re.MULTILINE)
    return "".join(parts)


_ERRORS = r"(?:\w+Error, )*\w+Error"
_SEVERAL = r"^    ((?:[\w.]+, )+[\w.]+): (.*(?:\n+ {5,}.*)*)"


def _each_alone(match):
    return "\n".join(f"    {name}: {match[2]}" for name in match[1].split(", "))
