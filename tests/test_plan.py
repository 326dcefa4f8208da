"""The plan of a stream: numbers only, so nothing is read."""

import math
from itertools import pairwise

import pytest
import torch

from mgtta.data.plan import plan_batches

SIZES = {"fog": 7, "snow": 4}


def rows(batches):
    return torch.cat([planned.rows for planned in batches])


@pytest.mark.parametrize("options", [{}, {"mixed": True}, {"shuffle": False}, {"mixed": True, "seed": 5}])
def test_a_plan_has_every_image_once_in_an_order_that_the_batch_size_does_not_change(options):
    plans = [plan_batches(list(SIZES), list(SIZES.values()), batch_size=n, **options) for n in (1, 3, 100)]
    expected = {(d, i) for d, size in enumerate(SIZES.values()) for i in range(size)}
    for found in plans:
        assert {tuple(row) for row in rows(found).tolist()} == expected
        assert len(rows(found)) == len(expected)
        assert torch.equal(rows(found), rows(plans[0]))
    names = ["mixed"] if options.get("mixed") else ["fog", "snow"]
    assert [planned.domain for planned in plans[2]] == names


def test_a_plan_with_imbalance_orders_by_the_labels_of_each_domain():
    labels = [torch.tensor([0, 1, 2, 0, 1, 2, 0]), torch.tensor([3, 4, 3, 4])]
    found = plan_batches(list(SIZES), list(SIZES.values()), labels=labels, imbalance=math.inf)
    classes = [labels[d][i].item() for d, i in rows(found).tolist()]
    changes = sum(a != b for a, b in pairwise(classes))
    assert changes == 4  # five classes, one after another


def test_a_plan_takes_the_first_images_of_each_domain():
    found = plan_batches(["a", "b"], [5, 5], first=2)
    assert [len(planned.rows) for planned in found] == [2, 2]
    assert torch.equal(found[0].rows[:, 1], found[1].rows[:, 1])
