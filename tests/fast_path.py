"""Methods on the fast path and the names of those that take it, for the tests of `mgtta.fast`."""

from conftest import confident_vit, images, random_generator

import mgtta
from mgtta.adaptation.state import own_buffers
from mgtta.adaptation.wrapper import innermost
from mgtta.methods.registry import FISHER, GENERATOR, SOURCE, recipe

NAMES = ("noadapt", "tent", "eq7_sgd", "eq7_adam", "mgtta", "mgtta_lstm")
CHOOSING = ("eta", "eata", "eata_come", "rdumb")  # methods that choose images, by masks
ROUNDED = ("sar", "sar_come", "deyo", "roid", "cmf")  # methods whose own steps run over rounded weights
FOLLOWING = ("mgtta_plus", *CHOOSING)  # methods with running means of their own


def make(name, net=None, device="cpu", precision="bf16", **settings):
    model = mgtta.load_model(net or confident_vit()).to(device)
    needs = recipe(name).needs
    if GENERATOR in needs:
        settings.setdefault("generator", random_generator(memory="lstm" if "lstm" in name else "gml"))
    if SOURCE in needs:
        settings["source"] = mgtta.source_statistics(model, images(16, seed=99))
    if FISHER in needs:
        settings["fisher"] = mgtta.fisher_information(model, images(16, seed=99))
    return mgtta.create(name, model, precision=precision, **settings)


def batches(n=4, size=8):
    return [images(size, seed=t) for t in range(n)]


def followed(method):
    """Return the running means of a method."""
    return {name: t for name, t in own_buffers(innermost(method)).items() if not name.startswith("statistics")}


def close(a, b):
    """Up to what bfloat16 rounds: single logits of so sharp a model may differ by more."""
    return (a - b).norm() < 0.05 * b.norm()
