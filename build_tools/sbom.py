"""Writes the contents of a wheel as a CycloneDX file into its `.dist-info/sboms` (PEP 770).

It lists the package, each of its libraries by its SHA-256, and the code compiled into them: headers
of pybind11 and torch, the statically linked CUDA runtime, and CCCL.
"""

import hashlib
import importlib.metadata
import json
from pathlib import Path

NAME = "sboms/storage_ops.cdx.json"
Facts = dict[str, str]


def add(tree: Path) -> None:
    """Write the file into an unpacked wheel."""
    (info,) = tree.glob("*.dist-info")
    (info / "sboms").mkdir()
    (info / NAME).write_text(f"{json.dumps(contents(tree), indent=1)}\n")


def contents(tree: Path) -> dict[str, object]:
    """Return the bill of materials of an unpacked wheel."""
    facts: Facts = json.loads((tree / "storage_ops/lib/build_info.json").read_text())
    libraries = sorted((tree / "storage_ops").rglob("*.so"))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "name": "storage_ops", "version": facts["version"],
                "purl": f"pkg:pypi/storage-ops@{facts['version']}",
                "licenses": [{"license": {"id": "BSD-3-Clause"}}],
                "properties": [
                    {"name": f"storage_ops:{name}", "value": facts[name]}
                    for name in ("compiler", "sources")
                ],
            },
        },
        "components": [
            *_compiled_in(facts),
            *(
                {
                    "type": "file", "name": str(path.relative_to(tree)),
                    "hashes": [{"alg": "SHA-256", "content": _digest(path)}],
                }
                for path in libraries
            ),
        ],
    }  # fmt: skip


def _compiled_in(facts: Facts) -> list[dict[str, str]]:
    pybind11 = importlib.metadata.version("pybind11")
    parts = [("pybind11", pybind11, f"pkg:pypi/pybind11@{pybind11}")]
    parts += [(f"torch headers {minor}", minor, "") for minor in facts["bindings"].split()]
    for cuda in facts["cuda"].split():
        parts.append(("CUDA runtime, static, and CCCL headers", cuda, ""))
    return [
        {"type": "library", "name": name, "version": version, **({"purl": purl} if purl else {})}
        for name, version, purl in parts
    ]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
