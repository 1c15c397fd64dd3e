"""The GPU reader: a Program lowered once to Triton kernels, and steps replayed as CUDA graphs.

`device` says whether there is a GPU without importing PyTorch; the other modules need it.
"""
