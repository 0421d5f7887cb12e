"""GPUs: CUDA memory that processes share, and asynchronous copies of a publish.

copies.accelerator (interface) <- cuda.Cuda -> cuda_driver (ctypes), cuda_copies
packing -> device_copies.DeviceCopies; memory.Buffer <- device_buffers.DeviceBuffer

*CUDA.* The driver creates the library's *streams*. torch has a pool of 32, which it
hands out repeatedly, so that one could be the stream on which the user trains or
captures a graph. Each thread has one stream, which another thread reuses after its end,
as torch's allocator keeps memory for each stream.

The driver and torch number devices alike, in the order of ``CUDA_VISIBLE_DEVICES``. A
thread that has not chosen a device has number 0 as its current one; accidental work on
that would create a context of about a hundred megabytes. So the default device is that
of the first call of :meth:`Cuda.device`, by the thread that joins.
"""
