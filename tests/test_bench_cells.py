"""Keys of cells, which tell work apart."""

import dataclasses

from small_bench import FEW, SMALL, TINY

from mgtta.bench.cells import Cell, Setup, Training, digest


def test_keys_tell_work_apart():
    cell = FEW[1]
    same = [
        cell.key(SMALL),
        dataclasses.replace(cell, experiment="ablation", chosen_from=(1.0,)).key(SMALL),
        cell.key(dataclasses.replace(SMALL, device="cuda")),
    ]
    assert len(set(same)) == 1
    changes = [
        {"seed": 1},
        {"method": "tent"},
        {"batch_size": 4},
        {"settings": (("lr", 1.0),)},
        {"max_updates": 3},
        {"training": TINY},
        {"training": Training()},
        {"alone": True},
        {"data": "elsewhere"},
        {"max_seconds": 1.0},
    ]
    others = [dataclasses.replace(cell, **change).key(SMALL) for change in changes]
    timed = dataclasses.replace(cell, alone=True).key(dataclasses.replace(SMALL, device="cuda"))
    setups = [cell.key(Setup(images=7)), cell.key(Setup(model="resnet18"))]
    assert len({*others, same[0], timed, *setups}) == len(changes) + 4
    still = FEW[0]
    assert still.key(SMALL) == dataclasses.replace(still, max_updates=3).key(SMALL)


def test_precision_tells_work_apart_where_it_makes_a_difference():
    cell, gpu = FEW[0], Setup(device="cuda")
    same = [Setup(), Setup(precision="auto"), Setup(profile=True), gpu]
    assert len({cell.key(setup) for setup in same}) == 1
    others = [Setup(precision="bf16"), dataclasses.replace(gpu, precision="auto"), Setup(tf32=True)]
    assert len({cell.key(setup) for setup in (same[0], *others)}) == 4


def test_fewer_images_are_the_same_work_whoever_limits_them():
    cell = Cell("corruptions", "tent", ("fog",))
    few = dataclasses.replace(cell, limit=64)
    named = Setup(data="images", images=256)
    assert (
        few.key(named) == few.key(dataclasses.replace(named, images=None)) == cell.key(Setup(data="images", images=64))
    )
    assert few.key(named) != cell.key(named)
    assert dataclasses.replace(cell, limit=512).key(named) == cell.key(named)
    assert few.key(Setup(images=256)) != cell.key(Setup(images=64))  # other characters are rendered


def test_keys_are_those_of_version_0_1():
    """So that a folder of records of that version counts as done."""
    trained = dataclasses.replace(FEW[1], training=TINY, settings=(("lr", 0.1),), max_seconds=2.0)
    gpu = Setup(model="m", checkpoint="c", data="d", device="cuda", precision="auto", tf32=True)
    found = [cell.key(setup) for cell in (FEW[0], trained) for setup in (SMALL, gpu)]
    assert found == ["de953f8d62ff0262", "29ae2030b55c9fc6", "483c8cf936952119", "2ad3f0468b9c05f5"]
    assert digest(trained) == "3425bc93113ebf7f"


def test_keys_tell_settings_apart_that_a_method_had_in_version_0_1():
    """What was deyo then is deyo@mgtta now; deyo is other work. Methods that did not change keep their keys."""
    cells = {name: Cell("corruptions", name, ("fog",)) for name in ("deyo", "deyo@mgtta", "tent", "tent@mgtta")}
    keys = {name: cell.key(SMALL) for name, cell in cells.items()}
    assert keys["deyo@mgtta"] == digest([dataclasses.replace(cells["deyo"], experiment=""), SMALL])
    assert keys["tent"] == digest([dataclasses.replace(cells["tent"], experiment=""), SMALL])
    assert len(set(keys.values())) == 4
