"""The GPU decode kernels: CUDA C++ in `device/`, compiled by NVRTC when first used, hosted here.

`plan` (pure) -> `layer.CudaLayer` (plan, run) -> `gpu.Gpu` (the driver). `build` makes machine code
and keeps it; `cubin` reads what is in it. Bits: docs/numerics.md. Needs the extra ``moet[gpu]``.
"""
