"""CMA-ES, as FOA uses it: its samples, and that it resumes bit for bit."""

import copy

import numpy as np
import pytest

from mgtta._lib.files import read_tree, write_tree
from mgtta.methods._evolution import Evolution


def test_foa_samples_by_eq_6():
    """p_k = m + tau C^(1/2) N(0, I), C's root by its eigenvectors, which are renewed every few generations."""
    evolution = Evolution(40, 7, seed=3)
    for t in range(30):
        random = copy.deepcopy(evolution._random)
        asked, es = evolution.ask(), evolution._es
        z = random.standard_normal((7, 40))
        np.testing.assert_allclose(asked, es.mean + es.sigma * (z * es.sm.D) @ es.sm.B.T, rtol=1e-12, atol=1e-12)
        if es.sm.last_update == es.sm.count_tell and t:
            np.testing.assert_allclose((es.sm.B * es.sm.D**2) @ es.sm.B.T, es.sm.C, atol=1e-12)
        evolution.tell(np.ones(40), [1600.0, *((asked - 2) ** 2 * np.arange(1, 41)).sum(1)])


@pytest.mark.parametrize(("dimension", "population"), [(8, 5), (320, 9)])
def test_evolution_resumes_bit_for_bit(dimension, population, tmp_path):
    def generation(evolution):
        asked = evolution.ask()
        extra = 0.1 * np.cos(np.arange(dimension))
        fitness = [float((weights * (v - 1) ** 2).sum()) for v in [extra, *asked]]
        evolution.tell(extra, fitness)
        return asked

    weights = np.linspace(1, 30, dimension)
    evolution, straight, lags = Evolution(dimension, population, seed=0), [], []
    for t in range(36):
        straight.append(generation(evolution))
        if t % 5 == 3:
            write_tree(tmp_path / str(t), evolution.state(), {})
            lags.append(evolution._es.sm.count_tell - evolution._es.sm.last_update)
            twin = copy.deepcopy(evolution)
    assert evolution._es.sm.count_eigen > 2
    assert dimension < 100 or len(set(lags)) > 2  # saved at several distances from the last decomposition of C
    for t in range(3, 36, 5):
        other = Evolution(dimension, population, seed=7)
        generation(other)  # somewhere else entirely
        other.load(read_tree(tmp_path / str(t))[0])
        for expected in straight[t + 1 :]:
            np.testing.assert_array_equal(generation(other), expected)
        assert other._es.sigma == evolution._es.sigma
    for expected in straight[34:]:
        np.testing.assert_array_equal(generation(twin), expected)
