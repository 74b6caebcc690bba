"""What runs inside vLLM's workers: weights from a folder, in place, with everything rebuilt that is made of them.

Start the server with ``--worker-extension-cls logitless.rollout.vllm.worker.FolderWeights``; logitless has to be
installed beside vLLM (``pip install --no-deps logitless`` is enough: nothing here imports more than torch and
safetensors). It does what vLLM's own ``reload_weights`` does, reads differences too, and mends what that leaves stale:
on CPUs a linear layer multiplies with a packed copy of its weight, and that of an LM head tied to the embedding is not
made anew.
"""

from typing import Any

import torch

from logitless.rollout.vllm.weight_folder import read_marker, read_weights

if torch.cpu._is_amx_tile_supported():  # bfloat16 products of 1 to 3 rows end the process otherwise
    torch.cpu._init_amx()


class FolderWeights:
    """Methods that vLLM adds to its workers; called through ``/collective_rpc``."""

    def load_weight_folder(self, folder: str) -> dict[str, Any]:
        """Take the weights of a complete folder; the caller has paused sampling and resets the prefix cache.

        Args:
            folder: of ``WeightFolders``.

        Returns:
            The marker's version, and how many packed copies were made anew.
        """
        from pathlib import Path

        worker: Any = self
        worker.reload_weights(weights_iterator=read_weights(folder))
        return {
            "version": read_marker(Path(folder))["version"],
            "rebuilt": repack_tied_heads(worker.model_runner.get_model()),
        }


def repack_tied_heads(model: torch.nn.Module) -> int:
    """Make the packed weights of LM heads anew that share their weight with an embedding; returns how many.

    Equals a no-op on GPUs, where products read the weight itself.
    """
    heads: list[Any] = [m for m in model.modules() if type(m).__name__ == "ParallelLMHead" and hasattr(m, "cpu_linear")]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)
    return len(heads)
