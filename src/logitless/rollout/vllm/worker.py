"""An extension of vLLM's workers that loads weights from a folder, in place.

Start the server with ``--worker-extension-cls logitless.rollout.vllm.worker.FolderWeights``; logitless has to be
installed beside vLLM (``pip install --no-deps logitless`` is enough: nothing here imports more than torch and
safetensors). In addition to vLLM's own ``reload_weights`` it reads differences, and fixes a stale copy: on CPUs a
linear layer multiplies with a packed copy of its weight, which ``reload_weights`` does not rebuild for an LM head tied
to the embedding.
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
            "rebuilt": repack_tied_heads(worker.model_runner.get_model()),
        }


def repack_tied_heads(model: torch.nn.Module) -> int:
    """Rebuild the packed weights of LM heads; returns how many. On GPUs there are none."""
    heads: list[Any] = [m for m in model.modules() if type(m).__name__ == "ParallelLMHead" and hasattr(m, "cpu_linear")]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)
    return len(heads)
