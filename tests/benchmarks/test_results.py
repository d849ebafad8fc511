import json
import re

import matplotlib
import pytest
from matplotlib import image

from benchmarks._harness import RESULTS, text_of
from benchmarks.report import kept, pages, pictures
from benchmarks.report.__main__ import DEMO


def test_pages_are_as_make_results_writes_them():
    texts = {page.name: page.read_text() for page in pages.PAGES}
    for name, text in texts.items():
        assert pages.filled(text) == text, f"{name}: run `make results`"
    for name in pages.SECTIONS:
        assert sum(f"<!-- results: {name} -->" in text for text in texts.values()) == 1
    assert "<!-- results: headline -->" in texts["README.md"]


def slug(line):
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_links_in_pages_have_targets(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            name, _, heading = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), target
            lines = path.read_text().splitlines() if heading else []
            assert not heading or heading in map(slug, lines), target


@pytest.mark.skipif(
    matplotlib.__version_info__ < (3, 11), reason="matplotlib 3.11 drew it; text of 3.8 is smaller"
)
def test_the_picture_of_the_demo_shows_the_kept_result(tmp_path):
    pictures.demo(tmp_path / "demo.png", next(kept.results_of("demo")))
    new, old = (image.imread(path) for path in (tmp_path / "demo.png", DEMO))
    assert new.shape == old.shape and abs(new - old).mean() < 0.01, "run `make results`"


@pytest.mark.parametrize("hardware", kept.kept())
def test_kept_results_have_their_metadata(hardware):
    for result in kept.kept()[hardware]:
        assert result["hardware"] == hardware and result["commit"] and result["rows"]
        assert "running" not in result
        report = (RESULTS / hardware / "report.md").read_text()
        assert f"## {result['stem']}\n" in report and result["commit"] in report


def test_only_sections_between_markers_are_replaced():
    text = "1\n<!-- results: plan -->\nold\n<!-- end -->\n2\n"
    new = pages.filled(text)
    assert new.startswith("1\n<!-- results: plan -->\n| budget |") and new.endswith(
        "<!-- end -->\n2\n"
    )
    assert "400 MiB" in new and "old" not in new and pages.filled(new) == new
    with pytest.raises(ValueError, match=r"`section` is 'plans'\. Expected one of headline"):
        pages.filled("<!-- results: plans -->\n<!-- end -->\n")


def result(commit, *rows):
    rows_of_result = [{"shape": shape, "case": "a", "ms": ms} for shape, ms in rows]
    return {"stem": "x", "hardware": "h", "commit": commit, "skipped": {}, "rows": rows_of_result}


def test_new_shapes_replace_old_ones():
    both = kept.merged(result("one", ("A", 1), ("B", 2)), result("two", ("B", 3), ("C", 4)))
    assert [(row["shape"], row["ms"]) for row in both["rows"]] == [("A", 1), ("B", 3), ("C", 4)]
    assert both["commit"] == "one, two"
    whole = result("three", ("A", 1), ("B", 1), ("C", 1))
    assert kept.merged(both, whole) == whole
    left_out = {"skipped": {"A: x": "why", "B: x": "why", "x": "why"}}
    remeasured = kept.merged({**both, **left_out}, result("four", ("B", 4)))
    assert remeasured["skipped"] == {"A: x": "why", "x": "why"}


def test_new_results_are_merged_into_kept_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "kept")
    files = tmp_path / "all.json", tmp_path / "one.json"
    cut = {**result("two", ("B", 3)), "running": "B", "done": 0.5}
    files[0].write_text(json.dumps([result("one", ("A", 1)), cut]))
    files[1].write_text(text_of(result("three", ("A", 5))))
    assert [path.name for path in kept.take(files)] == ["x.json"] * 3
    kept_result = json.loads((tmp_path / "kept" / "h" / "x.json").read_text())
    assert [(row["shape"], row["ms"]) for row in kept_result["rows"]] == [("A", 5), ("B", 3)]
    assert kept_result["commit"] == "one, two, three" and "running" not in kept_result


def test_results_of_a_call_have_its_commit():
    called = {**result("one", ("A", 1)), "call": "loss"}
    first = kept.merged(None, called)
    assert first["calls"] == {"loss": "one"} and "call" not in first
    second = kept.merged(first, {**result("two", ("B", 1)), "call": "rows"})
    assert second["calls"] == {"loss": "one", "rows": "two"}
    assert kept.merged(second, result("three", ("A", 2)))["calls"] == second["calls"]


def test_stale_results_are_marked(tmp_path, monkeypatch):
    path = tmp_path / "h" / "x.json"
    path.parent.mkdir()
    path.write_text(text_of(result("one", ("A", 1))))
    before = path.read_text()
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    monkeypatch.setattr(kept, "is_stale", lambda result: result["stem"] == "x")
    assert list(kept.mark_stale()) == [path] and json.loads(path.read_text())["stale"]
    monkeypatch.setattr(kept, "is_stale", lambda result: False)
    assert list(kept.mark_stale()) == [] and path.read_text() == before


def test_gpus_come_first_with_the_versions_of_peers():
    gpu, *others = kept.kept().values()
    assert gpu[0]["gpu"] and not any(each["gpu"] for results in others for each in results)
    text = pages.linear_cross_entropy()
    assert text.startswith("On nvidia-h200, torch 2.11.0+cu130, ") and "quack-kernels 0.2.4" in text


@pytest.mark.parametrize("change", [{"quick": True}, {"stem": None}])
def test_quick_and_unnamed_results_are_not_kept(tmp_path, monkeypatch, change):
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "kept")
    whole = {**result("one", ("A", 1)), **change}
    (tmp_path / "a.json").write_text(json.dumps({k: v for k, v in whole.items() if v}))
    with pytest.raises(ValueError, match="Expected a complete result"):
        list(kept.take([tmp_path / "a.json"]))
    assert not (tmp_path / "kept").exists()
