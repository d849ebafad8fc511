"""The demo's picture says what it shows, on which device, and the peaks."""

from matplotlib.figure import Figure

from storage_ops.cli.demo import picture
from storage_ops.memory import Measurement, Sample

MIB = 1 << 20


def test_titles(monkeypatch, tmp_path):
    titles = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: titles.extend(x.get_title() for x in self.axes)
    )
    samples = [Sample(0.0, 0), Sample(1.0, 3 * MIB)]
    runs = {
        label: Measurement(peak * MIB, 0, samples, device="cpu")
        for label, peak in (("plain", 3), ("ours", 2))
    }
    picture.draw(tmp_path / "a.png", {"plain": [1.0]}, runs)
    picture.draw(tmp_path / "a.png", {}, {"kept": Measurement(MIB, 0, samples)})
    assert titles == [
        "Training loss",
        "Memory over one training step of the GPT\non cpu: peaks 3 MiB, 2 MiB",
        "Memory over one training step of the GPT\npeak 1 MiB",
    ]
