"""CUDA operator modules that work alone: `_ops_ewise`, `_ops_layernorm`, `_ops_rmsnorm`,
`_ops_softmax`, `_ops_cross_entropy`. They are built where nvcc is; docs/cuda_ops.md describes them.

    from rm_abstract.ops import _ops_softmax
    _ops_softmax.forward(x, y=y, stream=torch.cuda.current_stream().cuda_stream)
"""
