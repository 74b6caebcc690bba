"""An extension of vLLM's workers that loads weights from a folder, in place.

Start the server with ``--worker-extension-cls logitless.rollout.vllm.worker.FolderWeights``; logitless has to be
installed beside vLLM (``pip install --no-deps logitless`` is enough: nothing here imports more than torch and
safetensors). In addition to vLLM's own ``reload_weights`` it reads differences, and fixes stale copies: on CPUs layers
multiply with packed copies of their weights, which ``reload_weights`` does not rebuild for an LM head tied to the
embedding, nor for experts.
"""

from typing import Any

import torch

from logitless.rollout.vllm.weight_folder import read_marker, read_weights

if torch.cpu._is_amx_tile_supported():  # bfloat16 products of 1 to 3 rows end the process otherwise
    torch.cpu._init_amx()


class FolderWeights:
    """Methods that vLLM adds to its workers; called through ``/collective_rpc``."""

    def load_weight_folder(self, folder: str) -> dict[str, Any]:
        """Load the weights of a complete folder. The caller pauses sampling before and resets the prefix cache after.

        Args:
            folder: of ``WeightFolders``.

        Returns:
            The marker's version, and how many packed copies were rebuilt.
        """
        from pathlib import Path

        worker: Any = self
        worker.reload_weights(weights_iterator=read_weights(folder))
        return {
            "version": read_marker(Path(folder))["version"],
            "rebuilt": repack(worker.model_runner.get_model()),
        }


_PACKED_ONCE = ("RoutedExperts", "TransformersRoutedExperts")
"""Classes of experts: of vLLM's own models, and of those that it takes from transformers (Hunyuan)."""


def repack(model: torch.nn.Module) -> int:
    """Rebuild the packed weights of LM heads and experts; returns of how many. On GPUs there are none."""
    modules: list[Any] = list(model.modules())
    heads = [m for m in modules if type(m).__name__ == "ParallelLMHead" and hasattr(m, "cpu_linear")]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)
    experts = [m for m in modules if type(m).__name__ in _PACKED_ONCE and m.w13_weight.device.type == "cpu"]
    for each in experts:  # vLLM packs them as the first weights are loaded, and not again
        each.quant_method.moe_kernel.fused_experts.process_weights_after_loading(each)
    return len(heads) + len(experts)
