"""NVIDIA GPUs.

device.py       CudaDevice
streams.py      three ways of copying over two streams
resources.py    the staging ring; descriptors of copies in flight
runs.py         parts as kernel arguments and as runs of images
chooser.py      choice of the fastest way, from measurements of calibrate.py
driver.py       batched copies of the CUDA driver, with ctypes
kernels.py      gather, scatter, shift; shape.py has their launch parameters
accelerator.py  the calls of torch and Triton that need a GPU
"""
