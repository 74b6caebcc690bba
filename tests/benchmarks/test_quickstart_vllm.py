"""The quickstart on a vLLM server learns what it learns in the trainer's process, and the committed result shows it."""

import quickstart_vllm
from logitless.train.recipe.loading import load_recipe


def test_a_server_finds_the_quickstarts_model_and_tokenizer_in_the_folder(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    recipe = load_recipe(quickstart_vllm.ROOT / "recipes" / "quickstart.yaml")
    folder = quickstart_vllm.model_folder(recipe, tmp_path / "model")
    assert AutoConfig.from_pretrained(folder).architectures == ["Qwen3ForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2
