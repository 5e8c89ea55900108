"""NVIDIA GPUs.

device.py       CudaDevice, and device memory for images
streams.py      three ways of copying over two streams; the staging ring
arguments.py    parts as kernel arguments and as runs of images
calibration.py  choice of the fastest way, by measurement
driver.py       the calls that need a GPU: batched copies of the CUDA driver with ctypes, torch, Triton
kernels.py      gather, scatter, copy_blocks, and a checksum
"""
