"""The one place that imports Triton, the language of the GPU kernels; `triton` is None if it is not installed."""

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = None
    tl = None

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4 does not have it
    TensorDescriptor = None

__all__ = ["TensorDescriptor", "tl", "triton"]
