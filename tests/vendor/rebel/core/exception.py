"""The exceptions of `rebel`."""


class RBLNCompileError(RuntimeError):
    """Source: texts "RBLNCompileError: Graph Generation: [...]" in public logs of compilations."""


class RBLNRuntimeError(RuntimeError):
    """Source: docs.rbln.ai 0.12, create_runtime: raised when the NPU that was asked for is missing
    or is not the one compiled for. optimum-rbln catches rebel.core.exception.RBLNRuntimeError."""
