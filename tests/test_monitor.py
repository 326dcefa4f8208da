"""The monitor and the estimate of accuracy: signals without labels, from any method, saved, resumed and sent on."""

import json
import math

import pytest
import torch
from conftest import CLASSES, convnet, images
from test_methods import make

import mgtta
from mgtta.adaptation.estimate import Calibration, evidence, fitted, probability
from mgtta.adaptation.monitor import Window
from mgtta.adaptation.wrapper import source_model
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import corrupted, stream
from mgtta.losses import entropy
from mgtta.running.sinks import JsonLines, Prometheus, TensorBoard


def a_calibration(of, **changed):
    about = {
        "coefficients": torch.tensor([[0.5, 0.1, 0.2, 0.3], [0.0, 1.0, 0.0, -1.0]], dtype=torch.float64),
        "scale": 1.0,
        "error": 2.0,
        "method": of.name,
        "images": 16,
        "labelled": True,
        "model": of.model.name,
        "fingerprint": of.fingerprint,
    }
    return Calibration(**{**about, **changed})


def moved(method, amount=0.5):
    """The method with other parameters than the source's, so that predictions change."""
    with torch.no_grad():
        for p in method.adapted.values():
            p.add_(amount * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    return method


# --- the estimate


def test_evidence_is_its_transcription():
    torch.manual_seed(0)
    given, asked = torch.randn(5, CLASSES), 3 * torch.randn(5, CLASSES)
    rows = evidence(given, asked, 2.0)
    for i in range(5):
        p, q = ((2.0 * row / row.std()).softmax(0) for row in (given[i].double(), asked[i].double()))
        y = int(p.argmax())
        least = min(p[y], q[y])
        unsure = -sum(float(v) * math.log(v) for v in p) / math.log(CLASSES)
        expected = [math.log(least / (1 - least)), unsure, float(q.argmax() == y)]
        assert torch.allclose(rows[i], torch.tensor(expected, dtype=torch.float64))


def test_evidence_does_not_change_when_a_shift_makes_all_logits_smaller():
    torch.manual_seed(0)
    given, asked = torch.randn(5, CLASSES), torch.randn(5, CLASSES)
    torch.testing.assert_close(evidence(0.5 * given + 1, 0.1 * asked, 2.0), evidence(given, asked, 2.0))


def test_evidence_of_two_classes_keeps_their_logits():
    given = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    rows = evidence(given, given, 2.0)
    assert torch.allclose(rows[:, 0], torch.tensor([1.0, 3.0], dtype=torch.float64))


def test_evidence_of_certain_predictions_is_finite():
    sure = torch.full((1, CLASSES), -1e4)
    sure[0, 2] = 1e4
    assert evidence(sure, sure, 5.0).isfinite().all()
    assert evidence(torch.zeros(1, CLASSES), sure, 5.0).isfinite().all()


def test_the_regression_finds_the_coefficients_that_made_the_labels(monkeypatch):
    monkeypatch.setattr("mgtta.adaptation.estimate.RIDGE", 1e-6)
    torch.manual_seed(0)
    rows = torch.randn(20_000, 3, dtype=torch.float64)
    true = torch.tensor([-0.5, 1.0, 0.0, 2.0], dtype=torch.float64)
    right = torch.bernoulli(probability(true, rows))
    found = fitted(rows, right)
    assert torch.allclose(found, true, atol=0.1)
    soft = fitted(rows, probability(true, rows))  # probabilities as labels give the coefficients themselves
    assert torch.allclose(soft, true, atol=1e-3)


def test_the_estimate_of_the_images_that_were_fitted_is_their_accuracy():
    torch.manual_seed(0)
    rows = torch.randn(64, 3, dtype=torch.float64)
    right = (torch.rand(64) < 0.3).double()
    assert probability(fitted(rows, right), rows).mean() == pytest.approx(float(right.mean()), abs=1e-6)


def test_calibrations_are_saved_and_damaged_ones_are_refused(model, tmp_path):
    calibration = a_calibration(make("tent", model))
    mgtta.save_calibration(calibration, tmp_path / "c")
    loaded = mgtta.load_calibration(tmp_path / "c")
    assert torch.equal(loaded.coefficients, calibration.coefficients)
    assert (loaded.error, loaded.method, loaded.labelled) == (2.0, "tent", True)
    wrong = a_calibration(make("tent", model), coefficients=torch.zeros(2, 9))
    mgtta.save_calibration(wrong, tmp_path / "wrong")
    mgtta.save_calibration(a_calibration(make("tent", model), scale=0.0), tmp_path / "flat")
    for name in ("wrong", "flat"):
        with pytest.raises(ValueError, match="damaged calibration"):
            mgtta.load_calibration(tmp_path / name)
    mgtta.save_source(mgtta.source_statistics(model, images(4)), tmp_path / "source")
    with pytest.raises(ValueError, match=r"make one with mgtta\.calibrate"):
        mgtta.load_calibration(tmp_path / "source")


def test_calibrate_leaves_the_method_as_it_was(model):
    method = make("tent", model, lr=0.1)
    method(images(8))
    before = method.state_dict()
    calibration = mgtta.calibrate(method, images(16, seed=5), batch_size=8, severities=[5])
    assert calibration.images == 16
    assert not calibration.labelled
    for name, value in method.state_dict()["params"].items():
        assert torch.equal(value, before["params"][name])
    assert method.updates == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clean_images": images(4)}, "at least 16"),
        ({"clean_images": images(16), "labels": torch.zeros(3)}, "one for each, or none"),
        ({"clean_images": images(16), "severities": [9]}, "unknown severity"),
    ],
)
def test_calibrate_refuses_too_little(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        mgtta.calibrate(make("tent", model), **arguments)


def test_estimates_of_characters_are_near_the_truth():
    """Calibrated on clean characters, measured under corruptions that it has not seen."""
    model = mgtta.load_model("glyphs_vit")
    method = mgtta.create("tent", model)
    x, y = Glyphs(32, seed=41).tensors()
    calibration = mgtta.calibrate(method, x, y, batch_size=32, severities=[5])
    assert 0 < calibration.error < 15
    errors = []
    for domain in corrupted(Glyphs(64, seed=42), ["contrast", "shot_noise"]):
        method.reset()
        monitor = mgtta.Monitor(method, calibration=calibration, share=1.0)
        right = 0
        for batch in stream(domain, batch_size=32):
            logits = method(batch.x)
            right += int((logits.argmax(1) == batch.y).sum())
            signals = monitor(batch.x, logits)
        errors.append(abs(signals.accuracy - 100 * right / 64))
        assert signals.gain == signals.accuracy - signals.source_accuracy
    assert sum(errors) / len(errors) < 15


# --- the monitor


def test_signals_are_those_of_the_batch(model, source):
    method = moved(make("tent", model, lr=0.0))
    monitor = mgtta.Monitor(method, source=source, calibration=a_calibration(method), share=1.0)
    x = images(8, seed=1)
    logits = method(x)
    signals = monitor(x, logits)
    with torch.no_grad():
        asked = model(x)
    assert signals.images == 8
    assert signals.updates == method.updates == 1
    assert signals.entropy == pytest.approx(float(entropy(logits).mean()))
    assert signals.confidence == pytest.approx(float(logits.softmax(1).amax(1).mean()))
    assert signals.changed == pytest.approx(float((logits.argmax(1) != asked.argmax(1)).float().mean()))
    expected = a_calibration(method).estimates(logits, asked).mean(0)
    assert [signals.accuracy, signals.source_accuracy] == pytest.approx((100 * expected).tolist())
    assert (signals.shifts, signals.shifted, signals.alarms, signals.events) == (0, False, 0, ())


def test_a_method_that_does_not_move_changes_nothing(model):
    method = make("noadapt", model)
    signals = mgtta.Monitor(method, share=1.0)(images(8), method(images(8)))
    assert signals.changed == 0
    assert signals.accuracy is signals.source_accuracy is signals.gain is signals.drift is None


def test_the_source_model_is_asked_about_the_share_of_the_images(model, monkeypatch):
    method = make("tent", model)
    monitor = mgtta.Monitor(method, share=0.25)
    asked = []
    features = type(model).features
    monkeypatch.setattr(type(model), "features", lambda self, x: asked.append(len(x)) or features(self, x))
    for n in (8, 1, 1, 1, 1, 64):
        monitor(images(n), torch.zeros(n, CLASSES))
    assert asked == [2, 1, 16]


def test_drift_is_zero_for_the_sources_own_images_and_large_for_others(model):
    x = images(64, seed=3)
    source = mgtta.source_statistics(model, x)
    method = make("noadapt", model)
    same = mgtta.Monitor(method, source=source, share=1.0)(x, method(x)).drift
    other = (0.2 * x).clamp(0, 1)
    far = mgtta.Monitor(method, source=source, share=1.0)(other, method(other)).drift
    assert same < 0.01
    assert far > 10 * same + 0.1


def test_a_shift_is_noticed_once(model):
    method = make("noadapt", model)
    monitor = mgtta.Monitor(method, share=1.0)
    found = []
    for i in range(12):
        x = images(32, seed=i)
        if i >= 6:
            x = 1 - 0.5 * x
        found.append(monitor(x, method(x)).shifted)
    assert found == [i == 6 for i in range(12)]
    assert monitor.seen.shifts == 1


def test_events_are_told_once(model, monkeypatch):
    method = make("tent", model)
    found = []
    monkeypatch.setattr(type(method), "events", found)
    monitor = mgtta.Monitor(method)
    x = images(8)
    assert monitor(x, method(x)).events == ()
    found.append({"image": 8, "action": "slow"})
    signals = monitor(x, method(x))
    assert signals.events == ({"image": 8, "action": "slow"},)
    assert signals.alarms == 1
    assert monitor(x, method(x)).events == ()
    found[:] = [{"image": 0, "action": "source"}]  # as after a reset
    assert monitor(x, method(x)).events == ({"image": 0, "action": "source"},)


def test_a_monitor_resumes(model, source):
    method = make("tent", model, lr=0.0)
    first = mgtta.Monitor(method, source=source, share=0.3, window=16)
    for i in range(3):
        first(images(8, seed=i), method(images(8, seed=i)))
    second = mgtta.Monitor(method, source=source, share=0.3, window=16)
    second.load_state_dict(first.state_dict())
    x = images(8, seed=9)
    logits = method.predict(x)
    assert first(x, logits) == second(x, logits)
    for wrong in (None, {}, {"seen": {}, "windows": {}}, {"seen": {"images": 1}}):
        with pytest.raises(ValueError, match="invalid state of a monitor"):
            second.load_state_dict(wrong)


def test_predictions_that_are_not_finite_are_left_out(model):
    method = make("noadapt", model)
    monitor = mgtta.Monitor(method, share=1.0)
    broken = method(images(4))
    broken[1] = math.nan
    assert math.isfinite(monitor(images(4), broken).entropy)


def test_windows_follow_the_last_images():
    window = Window(4)
    assert window.values() == []
    window.add(torch.zeros(8, 1))
    window.add(torch.ones(2, 1))
    assert window.values() == [0.5]  # 2 of the last 4
    window.add(torch.ones(64, 1))
    assert window.values() == [1.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"share": 0}, "share is"), ({"share": 1.5}, "share is"), ({"window": 0}, "window is")],
)
def test_monitor_refuses_what_is_out_of_range(model, changed, message):
    with pytest.raises(ValueError, match=message):
        mgtta.Monitor(make("tent", model), **changed)


def test_monitor_refuses_a_calibration_of_another_method_or_model(model):
    method = make("tent", model)
    with pytest.raises(ValueError, match=r"is of sar, not of tent"):
        mgtta.Monitor(method, calibration=a_calibration(method, method="sar"))
    with pytest.raises(ValueError, match=r"other weights .* mgtta\.calibrate"):
        mgtta.Monitor(method, calibration=a_calibration(method, fingerprint="other"))


def test_the_source_model_stays_when_the_method_moves(any_model):
    method = make("tent", any_model, lr=0.1)
    source = source_model(method)
    x = images(8)
    expected = any_model(x)
    for _ in range(3):
        method(x)
    with torch.no_grad():
        assert torch.allclose(source(x), expected)
    own = {id(p) for p in method.model.parameters()}
    assert sum(id(p) in own for p in source.parameters()) == len(own) - len(method.adapted)


# --- where signals go


@pytest.fixture
def three_batches(model, source):
    def run(*sinks):
        method = make("tent", model)
        monitor = mgtta.Monitor(method, source=source, calibration=a_calibration(method), to=sinks)
        return [monitor(images(8, seed=i), method(images(8, seed=i))) for i in range(3)]

    return run


def test_json_lines_hold_every_signal(three_batches, tmp_path):
    signals = three_batches(JsonLines(tmp_path / "logs" / "signals.jsonl"))
    read = [json.loads(line) for line in (tmp_path / "logs" / "signals.jsonl").read_text().splitlines()]
    assert read == [s.plain() for s in signals]
    assert read[-1]["images"] == 24
    assert {"entropy", "drift", "changed", "shifts", "events", "accuracy", "source_accuracy", "gain"} <= read[0].keys()


def test_prometheus_shows_gauges_by_stream(three_batches):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    signals = three_batches(Prometheus("one", registry), Prometheus("two", registry))[-1]
    for stream_name in ("one", "two"):
        for name, value in signals.numbers().items():
            assert registry.get_sample_value(f"mgtta_stream_{name}", {"stream": stream_name}) == value


def test_tensorboard_gets_a_scalar_for_each_batch(three_batches, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    signals = three_batches(board)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = events.Scalars("mgtta/accuracy")
    assert [s.step for s in scalars] == [8, 16, 24]
    assert [s.value for s in scalars] == pytest.approx([s.accuracy for s in signals])


def test_a_sink_whose_package_is_missing_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="pip install prometheus-client"):
        Prometheus()


def test_drift_of_a_network_whose_head_reads_other_features_than_its_last_norm_layer():
    model = mgtta.load_model(convnet("batch"))
    clean = images(32, seed=9)
    source = mgtta.source_statistics(model, clean)
    method = mgtta.create("mgtta+", model, source=source)
    assert method.model.reads_head
    monitor = mgtta.Monitor(method, source=source, share=1.0)
    near = monitor(clean, method(clean)).drift
    for t in range(4):
        x = images(32, seed=t) ** 4
        far = monitor(x, method(x)).drift
    assert near < 0.1 < far
