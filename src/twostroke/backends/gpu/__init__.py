"""The gpu backend: a Program lowered to Triton kernels, with steps replayed as CUDA graphs.

`device` finds a GPU without importing PyTorch; the other modules need PyTorch and Triton.
"""
