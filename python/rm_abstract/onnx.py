"""The backend interface of ONNX: ``onnx.backend.base.Backend`` on compiled programs, on the CPU.

``prepare`` gives what is called again and again, ``run_model`` and ``run_node`` call once. Needs
the `onnx` package (`pip install 'rm_abstract[onnx]'`); ``rm_abstract.compile`` of a file does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rm_abstract.base.errors import CompileError, ConfigError

try:
    import onnx
    from onnx.backend.base import Backend, BackendRep, namedtupledict
except ImportError as error:
    raise ImportError(
        "[onnx] expected the onnx package for the backend interface, got none; try pip install "
        "'rm_abstract[onnx]'"
    ) from error

if TYPE_CHECKING:
    from rm_abstract.onnx_file import OnnxExecutable

NEWEST_OPSET = 28


class PreparedModel(BackendRep):
    """A model that is compiled; ``executable`` has the names of its inputs and outputs."""

    def __init__(self, executable: OnnxExecutable) -> None:
        self.executable = executable

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs as a tuple of arrays, which names index too.

        inputs: arrays in the order of the graph's inputs, one array, or a dict by name. Raises what
        calling an ``onnx_file.OnnxExecutable`` raises.
        """
        if isinstance(inputs, dict):
            results = self.executable(**{name: np.asarray(x) for name, x in inputs.items()})
        else:
            given = inputs if isinstance(inputs, (list, tuple)) else [inputs]
            results = self.executable(*(np.asarray(x) for x in given))
        names = self.executable.output_names
        made: tuple[Any, ...] = namedtupledict("Outputs", names)(*map(np.asarray, results))
        return made


class RmBackend(Backend):
    """What the functions of this module are the methods of; for ``onnx.backend.test``."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        """False for a model that compiling refuses by name."""
        try:
            cls.prepare(model, device, **kwargs)
        except (CompileError, ConfigError):
            return False
        return True

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """model: a ModelProto, its bytes, or a path. Raises CompileError, and ConfigError for
        another device than the CPU or options, of which there are none."""
        from rm_abstract import api

        if not cls.supports_device(device):
            raise ConfigError(f"[onnx] expected the device CPU, got {device!r}")
        if kwargs:
            raise ConfigError(f"[onnx] expected no options, got {sorted(kwargs)}")
        source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
        return PreparedModel(api.compile(source, device="cpu"))

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any) -> Any:
        """``prepare(model, device).run(inputs)``."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: Any,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One operator on arrays in the order of its inputs that are not left out.

        ``opset_version``: which version of the operator; the newest known by default.
        ``outputs_info`` is not needed.
        """
        newest = min(NEWEST_OPSET, onnx.defs.onnx_opset_version())
        version = int(kwargs.pop("opset_version", newest))
        names = list(dict.fromkeys(name for name in node.input if name))
        arrays = [np.asarray(x) for x in inputs]
        if len(names) != len(arrays):
            raise ConfigError(f"[onnx] expected arrays for {names}, got {len(arrays)}")
        ports = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
            )
            for name, x in zip(names, arrays, strict=True)
        ]
        outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in node.output if n]
        graph = onnx.helper.make_graph([node], "node", ports, outputs)
        imports = [onnx.helper.make_opsetid(node.domain, version)]
        if node.domain not in ("", "ai.onnx"):
            imports.append(onnx.helper.make_opsetid("", newest))
        return cls.run_model(
            onnx.helper.make_model(graph, opset_imports=imports), arrays, device, **kwargs
        )

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """ "CPU", or "CPU:0"."""
        return device.upper() in ("CPU", "CPU:0")


is_compatible = RmBackend.is_compatible
prepare = RmBackend.prepare
run_model = RmBackend.run_model
run_node = RmBackend.run_node
supports_device = RmBackend.supports_device
