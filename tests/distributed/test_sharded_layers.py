"""Row-invariant layers whose weights are cut over ranks: run a second time, they give the same gradients."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from logitless.distributed.sharding import ShardedModel
from logitless.models.activations import set_modes
from logitless.models.lm_head import backbone, backbone_hidden
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.units import units_of
from tests.head.interpreter import complete_interpreter, interpreted
from tests.models.row_invariant.test_layers import small
from tests.models.tiny import packed
from tests.ranks import run_on_ranks


def _gradients(rank, name, mode):
    complete_interpreter()
    model = small(name).train()
    install_row_invariant(model)
    ShardedModel(model, units_of(model), init_device_mesh("cpu", (2,)), dtype=None, on_host=False)
    set_modes(model, [mode] * len(backbone(model).layers))
    hidden = backbone_hidden(model, packed((5, 7)))
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    (hidden.double() * weight).sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_shards_of_layers_that_run_again_have_the_gradients_of_those_that_keep_all(name):
    kept, again = (run_on_ranks(2, _gradients, name, mode)[0] for mode in ("keep", "recompute"))
    assert kept.keys() == again.keys()
    assert len(kept) > 5
    assert all(torch.equal(kept[name], again[name]) for name in kept)
