"""Which architectures vLLM serves; and that weights of mixtures arrive there under the names that it knows."""

from contextlib import closing

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from logitless.models.loading import load_model
from logitless.rollout.engine import Weights
from tests.models.families import FAMILIES
from tests.vllm.conftest import KEY, SHAPE, TOKENIZER, VLLM, engine_at
from vllm_process import vllm_server

WIDE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False}
MIXTURES = {
    "qwen3_moe": {"num_experts": 4},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def test_vllm_has_the_architectures_that_the_table_says():
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    assert {each.model_type for each in FAMILIES if each.served} == {
        each.model_type for each in FAMILIES if CLASSES[each.model_type] in known
    }


@pytest.mark.parametrize("name", MIXTURES)
def test_a_push_replaces_experts_routers_and_their_correction_bias(name, tmp_path):
    config = SHAPE | WIDE | {"model_type": name, "num_key_value_heads": 2} | MIXTURES[name]

    def model(seed: int):
        made = load_model(config, random_weights=True, seed=seed).eval()
        for key, bias in made.named_buffers():
            if key.endswith("correction_bias"):
                bias.copy_(0.1 * seed * made.get_input_embeddings().weight[: len(bias), 0].detach())
        return made

    model(99).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(str(tmp_path / "model"))
    flags = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--api-key", KEY)
    server = vllm_server(tmp_path / "model", VLLM, tmp_path / "server.log", flags)
    with server as process, closing(engine_at(process.url)) as engine:
        for version in (1, 2):
            engine.load(Weights.of(model(version)), version)
            assert engine.transfer_numbers["weights/probe_difference_max"] < 1e-4
