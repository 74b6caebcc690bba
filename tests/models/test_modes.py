"""Modes of a model, and walks over its parts."""

from torch import nn

from logitless.models.modes import evaluating, every_module, every_parameter


def mixed() -> nn.Module:
    """Modules in both modes; one of them, and its weight, occurs twice."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Dropout(), nn.Sequential(shared, nn.Linear(2, 2, bias=False)))
    model[1].eval()
    return model


def test_every_module_evaluates_and_gets_its_own_mode_back():
    model = mixed()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    assert set(before) == {True, False}


def test_the_walks_find_what_torchs_find():
    model = mixed()
    assert set(every_module(model)) == set(model.modules())
    assert set(every_parameter(model)) == set(model.parameters())
