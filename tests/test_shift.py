"""The shift detector: a batch of another domain is noticed, one of the same domain is not."""

import copy

import numpy as np
import pytest
import torch

from mgtta.adaptation.shift import Arriving, ShiftDetector

ENTRIES = 64


def summaries(count, n=32, centre=0.0, seed=0):
    """Summaries of batches of n images whose features have standard deviation 1."""
    random = np.random.default_rng(seed)
    return centre + random.standard_normal((count, ENTRIES)) / np.sqrt(n)


def followed(count=16, n=32):
    detector = ShiftDetector()
    for s in summaries(count, n):
        detector.follow(s, n)
    return detector


def test_the_spread_is_that_of_one_image():
    detector = followed()
    assert detector.seen == 16
    assert detector.spread == pytest.approx(ENTRIES, rel=0.15)
    assert detector.centre.abs().max() < 0.2


def test_batches_of_the_same_domain_are_no_shift():
    detector = followed()
    assert not any(detector.shifted(detector.distance(s, 32)) for s in summaries(200, seed=1))


@pytest.mark.parametrize("n", [2, 8, 128])
def test_other_batch_sizes_are_no_shift(n):
    detector = followed()
    assert not any(detector.shifted(detector.distance(s, n)) for s in summaries(200, n, seed=1))


def test_another_domain_is_a_shift():
    detector = followed()
    assert all(detector.shifted(detector.distance(s, 32)) for s in summaries(50, centre=0.4, seed=1))


def test_the_first_batches_are_no_shift():
    detector = ShiftDetector()
    for s in summaries(2, centre=5.0):
        assert not detector.shifted(detector.distance(s, 32))
        detector.follow(s, 32)


def test_the_centre_follows_a_slow_drift():
    detector = followed()
    for step, s in enumerate(summaries(200, seed=1)):
        s = s + 0.02 * step
        assert not detector.shifted(detector.distance(s, 32))
        detector.follow(s, 32)


def test_a_shift_detector_is_saved_and_loaded():
    detector = followed()
    other = ShiftDetector.loaded(copy.deepcopy(detector.state()))
    for s in summaries(20, seed=2):
        assert detector.distance(s, 8) == other.distance(s, 8)
        detector.follow(s, 8)
        other.follow(s, 8)
    assert detector.spread == other.spread
    assert torch.equal(detector.centre, other.centre)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seen": -1}, "out of range"),
        ({"seen": 1.5}, "out of range"),
        ({"spread": float("nan")}, "out of range"),
        ({"spread": None}, "out of range"),
        ({"centre": torch.zeros(2, 2)}, "out of range"),
        ({"centre": torch.tensor([float("inf")])}, "out of range"),
        ({"more": 1}, "other entries"),
    ],
)
def test_an_invalid_detector_state_is_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        ShiftDetector.loaded({**followed().state(), **change})


@pytest.mark.filterwarnings("error")
def test_a_summary_that_is_not_finite_has_no_finite_distance():
    detector = followed()
    for value in (1e300, np.inf, np.nan):
        assert not np.isfinite(detector.distance(np.full(ENTRIES, value), 8))


def test_nothing_arrives_if_nothing_was_sent():
    assert Arriving().take() is None
    assert copy.deepcopy(Arriving()).take() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_vector_arrives_once_and_in_copies():
    arriving = Arriving()
    arriving.send(torch.arange(5.0, device="cuda"), "told")
    other = copy.deepcopy(arriving)
    for one in (arriving, other):
        vector, told = one.take()
        assert torch.equal(vector, torch.arange(5.0))
        assert told == "told"
        assert one.take() is None
