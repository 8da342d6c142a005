"""New weights for a running vLLM: the class that vLLM mixes into its workers.

vLLM imports it by name in every worker process, so its folder is on their PYTHONPATH.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


class Reload:
    """Mixed into vLLM's worker class (`worker_extension_cls`)."""

    def rm_reload(self: Any, model: str) -> None:
        """Takes the weights of the folder ``model``, in the form of a checkpoint."""
        self.reload_weights(weights_iterator=_tensors(model))


def _tensors(model: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for name in sorted(os.listdir(model)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(model, name), framework="pt") as file:
                for key in file.keys():
                    yield key, file.get_tensor(key)
