"""The demo's picture states its subject, the device and the peaks."""

from matplotlib.figure import Figure

from storage_ops.cli.demo import picture
from storage_ops.memory import Measurement, Sample

MIB = 1 << 20


def texts_of(figure):
    return [
        (axes.get_xlabel(), [text.get_text() for text in axes.get_legend().get_texts()])
        for axes in figure.axes
    ]


def test_labels(monkeypatch, tmp_path):
    texts = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: texts.append(texts_of(self)))
    samples = [Sample(0.0, 0), Sample(1.0, 3 * MIB)]
    runs = {
        label: Measurement(peak * MIB, 0, samples, device="cpu")
        for label, peak in (("plain", 3), ("ours", 2))
    }
    picture.draw(tmp_path / "a.png", {"plain": [1.0]}, runs)
    picture.draw(tmp_path / "a.png", {}, {"kept": Measurement(MIB, 0, samples)})
    of_step = "share of a training step on cpu (%)", ["plain (peak 3 MiB)", "ours (peak 2 MiB)"]
    assert texts == [
        [("step", ["plain"]), of_step],
        [("share of a training step (%)", ["kept (peak 1 MiB)"])],
    ]
