"""Kernels, one folder for each kind of device: C++ sources in cpu, Triton in cuda."""
