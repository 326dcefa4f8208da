"""Whose settings a baseline has: its authors', or those of the MGTTA paper."""

import pytest
from baselines import NAMES, create, nets, rate
from conftest import images, vit

import mgtta
from mgtta.methods.registry import recipes


@pytest.mark.parametrize(
    ("name", "authors", "on_resnets", "mgttas"),
    [
        ("tent", 1e-3, 2.5e-4, 1e-3),
        ("eta", 1e-3, 2.5e-4, None),
        ("eata", 1e-3, 2.5e-4, 2.5e-4),
        ("sar", 1e-3, 2.5e-4, 1e-3),
        ("deyo", 1e-3, 2.5e-4, 5e-4),
        ("cotta", 0.01, 0.01, 0.05),
        ("spa", 0.01, 2.5e-3, None),
        ("roid", 2.5e-4, 2.5e-4, None),
    ],
)
def test_learning_rates_are_the_authors_by_kind_of_network(name, authors, on_resnets, mgttas):
    assert rate(create(name, vit())) == authors
    assert rate(create(name, nets()["convnext"])) == authors
    for net in ("resnet", "resnet_gn"):
        assert rate(create(name, nets()[net])) == on_resnets
        assert rate(create(name, nets()[net], lr=0.5)) == 0.5
    if mgttas is None:
        with pytest.raises(ValueError, match=f"the MGTTA paper does not run {name}: its only set .* 'authors'"):
            create(name, vit(), settings="mgtta")
    else:
        assert rate(create(name, vit(), settings="mgtta")) == mgttas
        assert rate(create(name, nets()["resnet"], settings="mgtta")) == mgttas


def test_a_vit_whose_stem_has_batchnorm_has_the_settings_for_vits():
    assert rate(mgtta.create("tent", mgtta.load_model("glyphs_vit"))) == 1e-3


def test_other_settings_of_both_sets():
    eata = [create("eata", vit(), settings=name) for name in ("authors", "mgtta")]
    assert [(m.margin, m.redundancy) for m in eata] == [(0.4, None), (0.5, 0.05)]
    cotta = [mgtta.create("cotta", vit(), settings=name) for name in ("authors", "mgtta")]
    assert [m.restored for m in cotta] == [0.001, 0.01]
    assert [m.optimizer.param_groups[0]["nesterov"] for m in cotta] == [True, False]
    spa = mgtta.create("spa", nets()["resnet_gn"])
    assert (spa.predictor_lr, spa.mask_ratio, spa.noise_ratio) == (0.025, 0.1, 0.1)


def test_a_set_of_settings_by_name_or_beside_it():
    assert mgtta.create("deyo@mgtta", vit()).name == "deyo@mgtta"
    assert mgtta.create("deyo", vit(), settings="mgtta").name == "deyo@mgtta"
    assert mgtta.create("deyo@authors", vit()).name == mgtta.create("deyo", vit(), settings="authors").name == "deyo"
    assert rate(mgtta.create("deyo@mgtta", vit(), lr=0.1)) == 0.1
    with pytest.raises(ValueError, match=r"unknown set of settings 'paper'; valid: authors, mgtta"):
        mgtta.create("deyo", vit(), settings="paper")
    with pytest.raises(ValueError, match=r"unknown set of settings ''; valid: authors, mgtta"):
        mgtta.create("deyo@", vit())
    with pytest.raises(ValueError, match="leave one out"):
        mgtta.create("deyo@mgtta", vit(), settings="authors")


@pytest.mark.parametrize("name", [*NAMES, "tent", "lame", "t3a", "foa", "mgtta"])
def test_baselines_say_whose_code_they_follow(name):
    assert recipes()[name].code.startswith("github.com/")


@pytest.mark.parametrize("name", ["eq7_adam", "mgtta"])
def test_betas_reach_the_optimizer(name):
    model = mgtta.load_model(vit())
    source = mgtta.source_statistics(model, images(16))
    method = mgtta.create(name, model, source=source, betas=(0.6, 0.98))
    assert method.optimizer.param_groups[0]["betas"] == (0.6, 0.98)
    for wrong in (0.8, (0.8,), (0.8, 1.0), (None, 0.9), ("a", "b")):
        with pytest.raises(ValueError, match="betas must be two numbers"):
            mgtta.create(name, model, source=source, betas=wrong)
    with pytest.raises(ValueError, match="unknown setting of eq7_sgd"):
        mgtta.create("eq7_sgd", model, source=source, betas=(0.6, 0.98))
