"""Triton kernels. Imported at the first operator on a CUDA tensor, never before."""
