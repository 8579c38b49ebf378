"""Triton kernels, with the signatures of the references they replace. Imported only where a CUDA device is used."""
