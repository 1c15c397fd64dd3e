"""The GPU reader: a Program lowered once to Triton kernels, and steps replayed as CUDA graphs."""
