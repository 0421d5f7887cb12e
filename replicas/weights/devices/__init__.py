"""GPUs: CUDA memory that processes share, and asynchronous copies of a publish.

copies.accelerator (interface) <- cuda.Cuda -> cuda_driver (ctypes), cuda_copies
packing -> device_copies.DeviceCopies; memory.Buffer <- device_buffers.DeviceBuffer
"""
