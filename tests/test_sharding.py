"""Shards over ranks and workers: every image once, whatever the numbers."""

import pytest
import torch
from test_datasets import SIZE, encode, pixels, tar

from mgtta._lib.ranks import Alone, share
from mgtta.data.datasets import open_dataset
from mgtta.data.shards import split
from mgtta.data.streams import split_stream, stream

NUMBERS = (1, 2, 3, 5, 7)
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than there are cores


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Seven shards of one to seven images; an image's label says which it is."""
    folder = tmp_path_factory.mktemp("shards")
    for s in range(7):
        tar(folder / f"{s}.tar", [(f"{s}{i}.{kind}", data) for i in range(s + 1) for kind, data in _sample(10 * s + i)])
    return folder


def _sample(number):
    return ("cls", str(number).encode()), ("png", encode(pixels(number)))


def expected(n):
    return [10 * s + i for s in range(n) for i in range(s + 1)]


class Pretended(Alone):
    """A rank of several, which has been told how many batches the others have."""

    def __init__(self, rank, size, most):
        self.rank, self.size, self._most = rank, size, most

    def most(self, number):
        return max(number, self._most)


def test_every_shard_belongs_to_one_rank():
    for n in NUMBERS:
        for ranks in NUMBERS:
            parts = [split([str(i) for i in range(n)], (rank, ranks)) for rank in range(ranks)]
            assert sorted(name for part in parts for name in part) == [str(i) for i in range(n)]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match="no shards"):
        split([], None)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("n", NUMBERS)
def test_ranks_with_shards_of_their_own(shards, n, workers):
    names = str(shards / f"{{0..{n - 1}}}.tar")
    for ranks in NUMBERS if not workers else (3,):
        mine = [open_dataset(names, size=SIZE, part=(rank, ranks)) for rank in range(ranks)]
        opened = [place.path for dataset in mine for place in {p.path: p for p in dataset._places}.values()]
        assert len(opened) == len(set(opened)) == n
        own = [len(share(torch.arange(7), rank, ranks)) for rank in range(ranks)]  # images of a batch
        longest = max(max(1, -(-len(dataset) // k)) for dataset, k in zip(mine, own, strict=True))
        batches = [
            list(split_stream(dataset, Pretended(rank, ranks, longest), batch_size=7, workers=workers, shuffle=False))
            for rank, dataset in enumerate(mine)
        ]
        assert {len(found) for found in batches} == {longest}
        assert all(b.x.shape[1:] == (3, SIZE, SIZE) for found in batches for b in found)
        assert max(sum(len(b.x) for b in step) for step in zip(*batches, strict=True)) <= 7
        assert sorted(y for found in batches for b in found for y in b.y.tolist()) == expected(n)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("n", NUMBERS)
def test_ranks_with_a_share_of_every_batch(shards, n, workers):
    dataset = open_dataset(str(shards / f"{{0..{n - 1}}}.tar"), size=SIZE)
    for ranks in NUMBERS if not workers else (3,):
        streams = [stream(dataset, batch_size=5, part=(rank, ranks), workers=workers) for rank in range(ranks)]
        assert len(set(map(len, streams))) == 1
        steps = [torch.cat([b.y for b in step]) for step in zip(*streams, strict=True)]
        whole = [b.y for b in stream(dataset, batch_size=5)]
        assert all(torch.equal(a, b) for a, b in zip(steps, whole, strict=True))
        assert sorted(y for step in steps for y in step.tolist()) == expected(n)


def test_only_shards_are_split_and_every_rank_needs_an_image_of_a_batch(shards, tmp_path):
    (tmp_path / "0.png").write_bytes(encode(pixels(0)))
    with pytest.raises(ValueError, match="only WebDataset shards are split"):
        open_dataset(tmp_path, part=(0, 2))
    mine = open_dataset(str(shards / "0.tar"), part=(1, 3))
    assert len(mine) == 0
    for options in ({"batch_size": 2}, {"first": 2}):
        with pytest.raises(ValueError, match="3 ranks need as many images"):
            split_stream(mine, Pretended(1, 3, 1), **options)


def test_first_counts_the_images_of_all_ranks(shards):
    names = str(shards / "{4..6}.tar")
    mine = [open_dataset(names, size=SIZE, part=(rank, 3)) for rank in range(3)]
    streams = [split_stream(d, Pretended(rank, 3, 2), batch_size=4, first=7) for rank, d in enumerate(mine)]
    assert [sum(len(b.x) for b in s) for s in streams] == [3, 2, 2]
