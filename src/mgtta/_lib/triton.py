"""The one place that imports Triton, in which kernels for a GPU are written; None where it is not installed."""

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = tl = None

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # nor do versions before 3.4 have it
    TensorDescriptor = None

__all__ = ["TensorDescriptor", "tl", "triton"]
