"""Row kernels: plain torch for any device, numba for CPU, Triton for CUDA."""
