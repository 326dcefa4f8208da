"""The one place that imports Triton, in which kernels for a GPU are written; None where it is not installed."""

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = tl = None

__all__ = ["tl", "triton"]
