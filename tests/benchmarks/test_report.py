import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.path import Path
from rich.console import Console

from benchmarks.report import markdown, pictures, sizes
from benchmarks.report import rows as rows_of

HEAD = {
    "stem": "loss", "commit": "abc", "day": "2026-01-02", "hardware": "some-cpu-2-threads",
    "torch": "2.13", "storage_ops": "0.1", "python": "3.11", "storage_path": "binding",
    "row_kernel": "C++", "packages": {"triton": "3.6"}, "skipped": {"Liger": "needs an NVIDIA GPU"},
}  # fmt: skip


def row(shape, case, time, mib, **more):
    return {"shape": shape, "case": case, "time / floor": time, "peak (MiB)": mib, **more}


@pytest.fixture
def result():
    rows = [
        row("S1", "floor (products)", 1.0, 50.0),
        row("S1", "eager", 1.2, 400.0),
        row("S1", "torch.compile", 1.0, 200.0),
        row("S1", "storage_ops, default budget", 0.9, 100.0, plan="token-chunked"),
        row("S1", "storage_ops, 1/64", 1.5, 50.0, plan="vocab-sliced"),
        row("S2", "eager", 1.1, 10.0),
        row("S2", "storage_ops", 1.0, 8.0),
        row("S2", "storage_ops, frozen", 1.0, ""),
    ]
    return {**HEAD, "rows": rows}


def test_report_of_one_result(result, tmp_path):
    markdown.write(tmp_path, [result], Console())
    text = (tmp_path / "report.md").read_text()
    assert "| storage_ops, default budget | 0.9 | 100.0 | token-chunked |" in text
    assert "at abc, 2026-01-02" in text and "- Liger: needs an NVIDIA GPU" in text
    assert "(loss.png)" in text and "### S2" in text
    assert "did not reach its end" not in text
    (tmp_path / "loss.png").stat()


def test_ratios_to_the_best_peers(result):
    text = markdown.ratio_line(rows_of.shapes(result)["S1"])
    assert (
        "Fastest peer: torch.compile; our fastest (storage_ops, default budget) takes 0.90" in text
    )
    assert "0.50 of its memory" in text
    assert "our smallest (storage_ops, 1/64) takes 0.25 of its memory and 1.50 of its time" in text
    assert markdown.ratio_line([row("S1", "eager", 1.0, 2.0)]) == ""


def test_the_report_of_an_incomplete_benchmark_says_so(result):
    text = markdown.section({**result, "running": "S2: eager", "done": 0.5}, [])
    assert "did not reach its end" in text and "S2: eager" in text


def test_empty_columns_and_curves_are_left_out():
    rows = [{"case": "a", "ms": 1, "none": "", "timeline": [[0, 1]]}, {"case": "b", "other": 2}]
    assert markdown.table_of_rows(rows).splitlines() == [
        "| case | ms | other |", "| --- | ---: | ---: |", "| a | 1 |  |", "| b |  | 2 |",
    ]  # fmt: skip


def test_pictures_are_opaque_and_light(result, tmp_path):
    result["rows"][5]["timeline"] = [[0.0, 1.0], [0.5, 9.0], [1.0, 2.0]]
    drawn = pictures.draw(tmp_path, result)
    assert [path.name for path in drawn] == ["loss.png", "loss-memory.png"]
    for path in drawn:
        pixels = image.imread(path)
        assert pixels.shape[0] > 300 and pixels.shape[1] > 600
        assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1
        corner = pixels[2, 2, :3]
        assert corner.min() > 0.95 and pixels[..., :3].min() < 0.3


def test_several_panels_have_a_narrow_picture(result, tmp_path):
    other = [{**r, "shape": "another"} for r in result["rows"]]
    drawn = pictures.draw(tmp_path, {**result, "rows": result["rows"] + other})
    assert [path.name for path in drawn] == ["loss.png"]  # the report shows the wide picture
    paths = drawn[0], tmp_path / f"loss{pictures.NARROW}.png"
    wide, narrow = (image.imread(path).shape for path in paths)
    assert narrow[0] > narrow[1] and narrow[1] < wide[1] / 2 < 600


def test_memory_is_drawn_for_a_dark_page_too(result, tmp_path):
    result["rows"][5]["timeline"] = [[0.0, 1.0], [0.5, 9.0], [1.0, 2.0]]
    pictures.draw(tmp_path, result)
    pixels = image.imread(tmp_path / "loss-memory-dark.png")[..., :3]
    assert pixels[2, 2].max() < 0.2 and pixels.max() > 0.85


def test_labels_cover_no_line_and_no_point():
    cases = [(f"storage_ops, fit for {k}% of the way to none", 20_000.0 - 1000 * k, 1 + k * k / 50)
             for k in range(6)]  # fmt: skip
    rows = [row("S", case, time, mib) for case, mib, time in cases] + [row("S", "none", 1, 21e3)]
    figure = pictures._tradeoffs({"S": [{**r, "time / floor": float(r["time / floor"])}
                                        for r in rows]})  # fmt: skip
    axes = figure.axes[0]
    assert axes.get_xlabel() == "peak memory (GiB)" and max(axes.lines[0].get_xdata()) < 21
    assert "3%" in [text.get_text() for text in axes.texts]
    renderer = FigureCanvasAgg(figure).get_renderer()
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        for line in axes.lines:
            places = axes.transData.transform(line.get_xydata())
            drawn = line.get_linestyle() != "None"
            assert not (drawn and Path(places).intersects_bbox(box, filled=False))
            assert not any(box.contains(x, y) for x, y in places)


def test_large_sizes_of_a_page_are_in_gib():
    rows = [{"case": "a", "peak (MiB)": 20_480.0, "budget (MiB)": ""},
            {"case": "b", "peak (MiB)": 512.0}]  # fmt: skip
    assert rows_of.in_readable_units(rows) == [
        {"case": "a", "peak (GiB)": 20.0, "budget (GiB)": ""}, {"case": "b", "peak (GiB)": 0.5},
    ]  # fmt: skip
    assert rows_of.in_readable_units(rows[1:]) == rows[1:]


def test_only_two_of_many_curves_are_drawn(result, monkeypatch):
    rows = [row("S", case, 1.0, mib, memory=[[0, mib], [1, 0]]) for case, mib in
            (("plain", 9.0), ("compile", 8.0), ("all", 3.0), ("compile+all", 2.0))]  # fmt: skip
    rows.append(row("T", "all", 1.0, 1.0, memory=[[0, 1.0], [1, 0]]))
    seen = []
    monkeypatch.setattr(pictures, "_timelines", lambda curves, page: seen.append((curves, page)))
    monkeypatch.setattr(pictures, "_save", lambda figure, path, *paper: path)
    pictures.draw(pictures.Path(), {**result, "rows": rows})
    assert [page for _, page in seen] == [pictures.LIGHT, pictures.DARK]
    for curves, _ in seen:
        assert [(r["shape"], r["case"]) for r in curves] == [("S", "plain"), ("S", "compile+all")]


def test_the_demo_is_drawn_from_its_result(tmp_path, monkeypatch):
    rows = [{"shape": "demo", "case": case, "peak (MiB)": mib, "losses": [3.0, 2.5],
             "timeline": [[0.0, 1.0], [0.5, mib], [1.0, 2.0]]}
            for case, mib in (("plain PyTorch", 9.0), ("storage_ops", 4.0))]  # fmt: skip
    seen = []
    drawn = pictures.picture.plot_timelines
    monkeypatch.setattr(
        pictures.picture, "plot_timelines", lambda *args: (seen.append(args[1]), drawn(*args))
    )
    pictures.demo(tmp_path / "both.png", {**HEAD, "rows": rows})
    assert [m.peak_bytes >> 20 for m in seen[0].values()] == [9, 4]
    assert [s.nbytes >> 20 for s in seen[0]["storage_ops"].timeline] == [1, 4, 2]
    for each in rows:  # an older result without losses
        del each["losses"]
    pictures.demo(tmp_path / "memory.png", {**HEAD, "rows": rows})
    both, memory = (image.imread(tmp_path / f"{name}.png") for name in ("both", "memory"))
    assert both.shape[0] == memory.shape[0] and both.shape[1] > memory.shape[1]


def test_pages_have_sizes_instead_of_short_names():
    assert sizes.spelled_out("S1 float32 focal") == "2048 x 768 x 50257, fp32 focal"
    assert sizes.spelled_out("GPT") == "GPT"
    assert sizes.without_names("five rounds, S1 seven") == "five rounds, 2048 x 768 x 50257 seven"


def test_cases_of_this_package_are_recognised():
    ours = ("storage_ops, 1/4", "discard, copy", "compile+all", "full_checkpoint", "autochunk")
    assert all(map(rows_of.is_ours, ours))
    assert not any(map(rows_of.is_ours, ("plain", "liger+full_checkpoint", "checkpoint")))


@pytest.mark.in_turn
def test_the_same_result_gives_the_same_picture(result, tmp_path):
    (tmp_path / "again").mkdir()
    first = pictures.draw(tmp_path, result)[0].read_bytes()
    assert first == pictures.draw(tmp_path / "again", result)[0].read_bytes()


def test_the_front_has_all_pareto_optimal_cases():
    ours = [("a", 1.0, 3.0), ("b", 2.0, 4.0), ("c", 3.0, 2.0), ("d", 4.0, 2.0)]
    assert [case for case, _, _ in pictures._front(ours)] == ["a", "c"]


def test_the_report_of_a_stale_result_says_so(result):
    assert "**Stale**" not in markdown.section(result, [])
    assert "**Stale**: the code has changed since." in markdown.section(
        {**result, "stale": True}, []
    )
