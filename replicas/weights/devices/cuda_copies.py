"""Enqueues copies of many tensors on a CUDA stream, small ones in batches.

Theory of operation
===================

Launching a copy takes about 5 us of the caller's thread. In that time a GPU copies ten
megabytes within its memory, or 250 KB to the host. A model has thousands of smaller
tensors, so they are copied in batches:

*Within the device*, all pairs below :data:`LARGE_NBYTES` of the same two dtypes go to
``torch._foreach_copy_``: one kernel copies about a hundred tensors, if all are on one
device, dense and of equal dtypes. Some releases of torch do not check the dtypes of the
destinations, and write garbage where they differ: so the pairs are sorted here.

*Between device and host*, small tensors that are adjacent in host memory, as in a slot,
become one transfer from or to temporary memory on the device, from torch's allocator on
the current stream; if that fails, tensors are copied one by one. Casts happen on the
device.

torch copies all other tensors one by one. Only host memory that is not pinned, or has
gaps, blocks the caller.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch

from replicas.weights.copies.streaming import writing

LARGE_NBYTES = 8 << 20
"""From this size on, a copy within the device takes longer than its launch.

The copy engine is faster than a kernel for it.
"""
SMALL_NBYTES = 512 << 10
"""From this size on, a copy between device and host takes longer than its launch."""
RUN_NBYTES = 16 << 20
"""Most bytes of small tensors in one transfer."""

_Pair = tuple[torch.Tensor, torch.Tensor]
_Tensors = list[torch.Tensor]
_IS_CUDA = operator.attrgetter("is_cuda")
_DTYPE, _NBYTES = operator.attrgetter("dtype"), operator.attrgetter("nbytes")
_DENSE, _DEVICE = torch.Tensor.is_contiguous, torch.Tensor.get_device
_LAZY = torch.Tensor.is_conj, torch.Tensor.is_neg


def enqueue(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    on_device: Callable[[torch.Tensor], bool] = _IS_CUDA,
) -> None:
    """Enqueue the copy of each source to its destination, on the current stream.

    Both have the same shape; values are cast where dtypes differ. The call waits only
    for copies with host memory that is not pinned, or has gaps.

    :param on_device: returns True for a tensor on a device, False for host memory.
    """
    if len(destinations) != len(sources):
        raise ValueError(f"{len(sources)} tensors cannot be copied to {len(destinations)}")
    with writing(destinations):
        if any(any(map(lazy, sources)) for lazy in _LAZY):  # torch would do so on the host, before the bytes are copied
            sources = [source.resolve_conj().resolve_neg() for source in sources]
        there, here = list(map(on_device, destinations)), list(map(on_device, sources))
        if all(there) and all(here):
            _copy_within(list(destinations), list(sources))
        else:
            _copy_mixed(list(zip(destinations, sources, strict=True)), list(zip(there, here, strict=True)))


def _copy_mixed(pairs: Sequence[_Pair], on_device: Sequence[tuple[bool, bool]]) -> None:
    """Enqueue copies of which some are between a device and the host.

    Small ones are combined; copies within the host are made here.

    :param pairs: (destination, source). :param on_device: for each pair, whether
        destination and source are on a device.
    """
    within: list[_Pair] = []
    small: tuple[list[_Pair], list[_Pair]] = [], []
    for pair, (there, here) in zip(pairs, on_device, strict=True):
        destination, source = pair
        host = 0 if here else 1  # index of the host's tensor
        if not source.numel():
            continue
        if there and here:
            within.append(pair)
        elif not (there or here):
            destination.copy_(source)
        elif pair[host].nbytes < SMALL_NBYTES and pair[host].is_contiguous():
            small[host].append(pair)
        else:
            (_to_device if host else _to_host)(*pair)
    _copy_within([destination for destination, _ in within], [source for _, source in within])
    for host, some in enumerate(small):
        for run in _runs(some, host):
            _transfer(run, host)


def _to_host(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy from a device to the host; block if the host tensor has gaps."""
    destination.copy_(source, non_blocking=destination.is_contiguous())


def _to_device(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy from the host to a device; a cast is done on the device."""
    if destination.dtype != source.dtype and source.is_contiguous():
        held = _room(source.nbytes, destination.device)
        if held is not None:
            source = held.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
    destination.copy_(source, non_blocking=True)


def _room(nbytes: int, device: torch.device) -> torch.Tensor | None:
    """Allocate temporary memory of torch on the device.

    Return None if there is too little.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def _copy_within(destinations: _Tensors, sources: _Tensors) -> None:
    """Enqueue copies between tensors on devices; small ones of one kind go together."""
    lists = destinations, sources
    kinds = zip(*(map(what, one) for what in (_DTYPE, _DEVICE, _DENSE) for one in lists), strict=True)
    alike: dict[tuple[object, ...], tuple[_Tensors, _Tensors]] = {}
    for destination, source, nbytes, kind in zip(*lists, map(_NBYTES, destinations), kinds, strict=True):
        if nbytes >= LARGE_NBYTES:
            destination.copy_(source, non_blocking=True)
            continue
        found = alike.get(kind)
        if found is None:
            found = alike[kind] = [], []
        found[0].append(destination)
        found[1].append(source)
    for kind, (some, others) in alike.items():
        if len(some) > 1 and kind[2] == kind[3] and kind[4] and kind[5]:  # one device, dense
            torch._foreach_copy_(some, others, True)
            continue
        for destination, source in zip(some, others, strict=True):
            destination.copy_(source, non_blocking=True)


def _transfer(run: Sequence[_Pair], host: int) -> None:
    """Enqueue the copy of a run (pairs with adjacent host tensors) in one transfer.

    It goes through temporary memory on the device; without that, one by one.

    :param host: index of the host's tensor in each pair: 0 copies to it, 1 from it.
    """
    hosts, others = [pair[host] for pair in run], [pair[1 - host] for pair in run]
    held = _room(_length(hosts), others[0].device) if len(run) > 1 else None
    if held is None:
        for pair in run:
            (_to_device if host else _to_host)(*pair)
    elif host:
        held.copy_(_bytes_of(hosts), non_blocking=True)
        _copy_within(others, _views(held, hosts))
    else:
        _copy_within(_views(held, hosts), others)
        _bytes_of(hosts).copy_(held, non_blocking=True)


def _runs(pairs: Sequence[_Pair], host: int) -> Iterator[list[_Pair]]:
    """Yield the pairs in lists that one transfer can copy.

    In a list the host's tensors are adjacent, and the others are on one device.

    :param host: index of the host's tensor in each pair.
    """
    run: list[_Pair] = []
    start = end = last = device = 0
    for pair in pairs:
        tensor, other = pair[host], pair[1 - host].get_device()
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        fits = (
            address == end
            and device == other
            and address + nbytes <= min(last, start + RUN_NBYTES)
            and (address - start) % tensor.dtype.itemsize == 0
        )
        if run and not fits:
            yield run
        if not (run and fits):
            storage = tensor.untyped_storage()
            run, start, last, device = [], address, storage.data_ptr() + storage.nbytes(), other
        run.append(pair)
        end = address + nbytes
    if run:
        yield run


def _length(hosts: Sequence[torch.Tensor]) -> int:
    """Return the bytes from the first of adjacent tensors to the end of the last."""
    return hosts[-1].data_ptr() + hosts[-1].nbytes - hosts[0].data_ptr()


def _bytes_of(hosts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the memory of adjacent tensors as one uint8 tensor, a view."""
    storage = hosts[0].untyped_storage()
    start = hosts[0].data_ptr() - storage.data_ptr()
    found = torch.empty(0, dtype=torch.uint8, device=hosts[0].device)
    return found.set_(storage, start, (_length(hosts),), (1,))


def _views(held: torch.Tensor, hosts: Sequence[torch.Tensor]) -> _Tensors:
    """Return views of ``held`` (uint8), with the dtypes and shapes of ``hosts``."""
    found: _Tensors = []
    start = 0
    for dtype, group in groupby(hosts, _DTYPE):
        some = list(group)
        counts = [one.numel() for one in some]
        end = start + sum(counts) * dtype.itemsize
        parts = held[start:end].view(dtype).split_with_sizes(counts)
        found += [part.view(one.shape) for part, one in zip(parts, some, strict=True)]
        start = end
    return found
