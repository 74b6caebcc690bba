"""Which architectures vLLM serves; that weights arrive there under the names that it knows, and are computed with."""

from collections.abc import Iterator

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from logitless.models.loading import load_model
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.probe import Probe, scored_tokens
from logitless.rollout.vllm.weight_folder import WeightFolders
from tests.models.families import FAMILY, OTHER_NAMES, TRAINED, Family
from tests.vllm.conftest import PROMPT, TOKENIZER
from tests.vllm.one_process import OneProcess
from tests.vllm.served import DENSE, MIXTURES, NAMED, served_config

PLAIN = Probe(PROMPT, max_difference=1e-4)
"""Of two implementations in float32: about 60 roundings of sums of 64 to 128 terms, at logits of about 5."""


def by_name(families):
    """As a parameter of tests."""
    return pytest.mark.parametrize("family", families, ids=lambda family: family.models)


@pytest.fixture(scope="module")
def held() -> Iterator[list[OneProcess]]:
    """The process, in a list: one that ended is replaced."""
    found: list[OneProcess] = []
    yield found
    for process in found:
        process.close()


@pytest.fixture
def process(held, tmp_path_factory) -> OneProcess:
    """One that answers."""
    if not held or not held[0].alive:
        held[:] = [OneProcess(tmp_path_factory.mktemp("process") / "log.txt")]
    return held[0]


def model_of(family: Family, seed: int):
    """With random weights, no weight at 0 or 1, and routers' corrections that do something."""
    model = load_model(served_config(family), random_weights=True, seed=seed, attention=family.attention).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def saved(model, folder):
    """The folder that a server is started with."""
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(str(folder))
    return str(folder)


def sent(model, folder, version=1) -> str:
    """The folder of weights that a sync writes."""
    return str(WeightFolders(folder).write(Weights.of(model).tensors(), version).folder)


def test_vllm_has_the_architectures_that_the_table_says():
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    unknown = {each.model_type for each in TRAINED if CLASSES[each.model_type] not in known}
    assert unknown | set(OTHER_NAMES) == {each.model_type for each in TRAINED if each.served == "no"}


@by_name(DENSE + NAMED)
def test_its_class_takes_each_weight_that_is_sent_by_its_name_and_shape_and_needs_no_other(family, process, tmp_path):
    model = model_of(family, 1)
    weights = sent(model, tmp_path / "weights")
    left, size = process.call("accept", folder=saved(model, tmp_path / "model"), weights=weights)
    assert left == []
    more = sum(tensor.numel() for _, tensor in Weights.of(model).tensors()) - size
    assert abs(more) <= {"gemma4_text": 4096}.get(family.model_type, 0)


@by_name([*MIXTURES, *(pytest.param(family, marks=pytest.mark.slow) for family in DENSE)])
def test_weights_that_are_sent_are_what_it_computes_with(family, process, tmp_path):
    process.call("open", folder=saved(model_of(family, 99), tmp_path / "model"))
    for version in (1, 2):
        model = model_of(family, version)
        process.call("load", folder=sent(model, tmp_path / "weights", version))
        PLAIN.check(process.ask, model, where="vLLM", version=version)
    [drawn] = process.ask(PROMPT, 1, SamplingOptions(max_new_tokens=8), 0)
    before = scored_tokens(model_of(family, 1), PROMPT, drawn.token_ids.tolist(), 1.0)
    assert max(abs(a - b) for a, b in zip(drawn.logp.tolist(), before, strict=True)) > 0.01


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_its_class_does_not_take_the_names_of_these(name, process, tmp_path):
    model = model_of(FAMILY[name], 1)
    with pytest.raises(RuntimeError, match=r"KeyError|no module or parameter named"):
        process.call("accept", folder=saved(model, tmp_path / "model"), weights=sent(model, tmp_path / "weights"))
