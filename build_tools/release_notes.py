"""Prints the changelog of a release: `python -m build_tools.release_notes v0.1.0`.

It fails unless the tag is the version of the package and CHANGELOG.md has a section for it.
"""

import re
import sys

from build_tools.toolchain import ROOT


def notes(tag: str, project: str, changelog: str) -> str:
    """Return the section of a changelog for a tag. Exit with a message if something is wrong."""
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    if tag != f"v{version}":
        sys.exit(
            f"The tag is {tag}, but pyproject.toml has version {version}. Expected v{version}."
        )
    section = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if section is None or not section[1].strip():
        sys.exit(f"CHANGELOG.md has no section '## {version}', or an empty one")
    return section[1].strip()


if __name__ == "__main__":
    project, changelog = (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text()
    print(notes(sys.argv[1], project, changelog))
