"""The metadata of the package and of its repository agree, and links have targets."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parents[2]
PROJECT = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
# Files that only a checkout needs.
NOT_IN_THE_SDIST = {".gitignore", ".ci/run"}


def anchors(path):
    """Return the anchors that GitHub and mkdocs write for a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_links_of_the_readme_are_absolute_and_their_targets_exist():
    """PyPI shows the README, where a relative link has no target."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://"), link
        if link.startswith(REPOSITORY):
            path, _, anchor = re.sub(f"{REPOSITORY}/(blob|raw)/main/", "", link).partition("#")
            assert (ROOT / path).is_file(), link
            assert not anchor or anchor in anchors(ROOT / path), link


def test_all_files_have_the_same_address_of_the_repository():
    addresses = re.compile(r"https://github\.com/[\w.-]+/storage_ops\b")
    for name in ("README.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml"):
        assert set(addresses.findall((ROOT / name).read_text())) == {REPOSITORY}, name
    for label, url in PROJECT["urls"].items():
        assert url.startswith(REPOSITORY), label
    repo = REPOSITORY.removeprefix("https://github.com/")
    assert f"--repo {repo}`" in (ROOT / "docs/trust.md").read_text().replace("\n", " ")


def test_the_citation_is_of_this_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    same = ("version", "license")
    assert {name: citation[name] for name in same} == {name: PROJECT[name] for name in same}
    assert citation["authors"] == PROJECT["authors"] and citation["title"] == PROJECT["name"]
    assert citation["cff-version"] == "1.2.0" and citation["message"]
    assert set(citation["keywords"]) <= set(PROJECT["keywords"])


def test_the_package_declares_its_annotations():
    """py.typed is for type checkers, the classifier for people. test_build.py checks the files."""
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "storage_ops/py.typed").is_file()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates_are_valid_for_github(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert all({"name", "url", "about"} == set(link) for link in form["contact_links"])
        return
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in ("textarea", "input") and field["attributes"]["label"]
    if path.stem == "bug_report":
        assert "python -m storage_ops info" in path.read_text()


def test_there_are_templates_for_bugs_and_features():
    assert {"bug_report", "config", "feature_request"} == {path.stem for path in TEMPLATES}


def test_sdist_contains_every_file_of_the_checkout(tmp_path):
    """It contains all that tests, benchmarks, `make lint` and `make docs` read."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files"], cwd=ROOT, capture_output=True, text=True
    )
    names = {n for n in listed.stdout.splitlines() if (ROOT / n).is_file()}
    if not names:
        pytest.skip("this tree is not a checkout of git, which lists its files")
    for name in names:
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "src" / name)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)],
        cwd=tmp_path / "src", check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        contained = {name.partition("/")[2] for name in opened.getnames()}
    assert names - contained == NOT_IN_THE_SDIST
