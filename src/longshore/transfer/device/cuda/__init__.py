"""NVIDIA GPUs.

device.py       CudaDevice
streams.py      three ways through two streams, and what waits for what
resources.py    the ring to stage in; descriptors of each copy under way
runs.py         from parts to kernels' orders and to runs of images
chooser.py      which way is the fastest, by calibrate.py's measurements
driver.py       the driver's batched copies, by ctypes
kernels.py      gather, scatter, shift; shape.py says how they go about it
accelerator.py  the calls of torch and Triton that need a GPU
"""
