"""Planning a gather, the readers' loop, and the cache of rows.

Readers are threads that stay in :func:`serve` and never need the interpreter: they sleep in ``read`` on a pipe, one byte
of which wakes one of them, and take jobs by counting a lane's ticket up. A ticket carries its gather's number, so that
a reader that comes late can tell that its gather is over; and pointers are looked at only with a valid ticket in hand,
which keeps the gather, and with it its memory, from ending.
"""

from __future__ import annotations

import errno

import numpy as np
from numba import carray

from kittiwake.ops.jit import kernel
from kittiwake.ops.row_reads.decode import decode_row
from kittiwake.ops.row_reads.layout import (
    AHEAD,
    BEGINS,
    BYTES,
    CUT_SHORT,
    DONE,
    END_NS,
    FIELDS,
    JOB_FIRST,
    JOB_PARTS,
    LIMIT,
    MISSES,
    NOT_FINITE,
    OUT,
    OUT_ROWS,
    PACKED,
    READ_OK,
    READS,
    STATUS,
    STOP,
    TARGET_FIRST,
    TARGETS,
    TICKET,
    UNIQUE,
    URGENT,
)
from kittiwake.ops.row_reads.system import (
    atomic_add,
    atomic_swap,
    error_number,
    monotonic_ns,
    pointer,
    read_at,
    read_into,
    write_from,
)

WAYS = 8
"""Rows of a set of the cache; the one used longest ago makes way."""
_INTERRUPTED = errno.EINTR
_COUNT = np.int64((1 << 32) - 1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


# The cache: tags and stamps int64 [sets, WAYS], rows uint8 [sets * WAYS, row bytes], clock int64 [1]


@kernel()
def _cache_set(row, sets):  # type: ignore[no-untyped-def]
    return np.int64((np.uint64(row) * _SPREAD >> np.uint64(32)) & np.uint64(sets - 1))


@kernel()
def _find_cached(tags, stamps, clock, row):  # type: ignore[no-untyped-def]
    """The place of a row in the cache, now the newest of its set; -1 where it is not there."""
    if tags.shape[0] == 0:
        return -1
    group = _cache_set(row, tags.shape[0])
    for way in range(WAYS):
        if tags[group, way] == row:
            clock[0] += 1
            stamps[group, way] = clock[0]
            return group * WAYS + way
    return -1


@kernel()
def keep_rows(ids, status, packed, target_first, unique, tags, stamps, rows, clock):  # type: ignore[no-untyped-def]
    """Put rows that were read well into the cache; of a gather that would turn it over only those asked for twice."""
    if tags.shape[0] == 0:
        return
    is_large = unique > tags.shape[0] * WAYS // 4
    for u in range(unique):
        if status[u] != READ_OK or (is_large and target_first[u + 1] - target_first[u] < 2):
            continue
        group = _cache_set(ids[u], tags.shape[0])
        oldest = 0
        for way in range(WAYS):
            if tags[group, way] == ids[u]:
                oldest = -1
                break
            if stamps[group, way] < stamps[group, oldest]:
                oldest = way
        if oldest >= 0:
            clock[0] += 1
            tags[group, oldest] = ids[u]
            stamps[group, oldest] = clock[0]
            kept, read = rows[group * WAYS + oldest], packed[u]
            for i in range(kept.shape[0]):
                kept[i] = read[i]


# One row, decoded to every place that asked for it


@kernel()
def _deliver(packed, u, kind, target_first, targets, out):  # type: ignore[no-untyped-def]
    """Decode row u to its places; its status. A row that is not all finite numbers is delivered as zeros."""
    first = out[targets[target_first[u]]]
    is_finite = decode_row(packed[u], kind, first)
    if not is_finite:
        first[:] = np.float32(0.0)
    for t in range(target_first[u] + 1, target_first[u + 1]):
        place = out[targets[t]]
        for i in range(place.shape[0]):
            place[i] = first[i]
    return READ_OK if is_finite else NOT_FINITE


@kernel()
def _deliver_zeros(u, target_first, targets, out):  # type: ignore[no-untyped-def]
    for t in range(target_first[u], target_first[u + 1]):
        out[targets[t]][:] = np.float32(0.0)


# Planning


@kernel()
def plan_gather(  # type: ignore[no-untyped-def]
    sorted_ids, targets, places, first_rows, begins_of_parts, aligns, kind, tags, stamps, cached, clock,
    ids, begins, target_first, misses, job_first, job_parts, packed, status, out,
):  # fmt: skip
    """Unique rows of a sorted gather, those in the cache delivered, the others made into jobs by their windows.

    sorted_ids int64 [M]; targets int64 [M] is the order that sorted them and becomes the places of ``out`` (through
    ``places``, unless that is empty). first_rows int64 [P + 1], begins_of_parts, aligns int64 [P]. Written: ids,
    begins, status [U], target_first [U + 1], misses [≤ U], job_first [J + 1], job_parts [J], rows of the cache in
    packed and out. Returns (U, misses, J).
    """
    row_bytes = packed.shape[1]
    unique, missed, jobs, part, window_end = 0, 0, 0, 0, np.int64(-1)
    m = 0
    while m < sorted_ids.shape[0]:
        row = sorted_ids[m]
        ids[unique] = row
        target_first[unique] = m
        while m < sorted_ids.shape[0] and sorted_ids[m] == row:
            if places.shape[0] > 0:
                targets[m] = places[targets[m]]
            m += 1
        target_first[unique + 1] = m
        place = _find_cached(tags, stamps, clock, row)
        if place >= 0:
            kept, wanted = cached[place], packed[unique]
            for i in range(row_bytes):
                wanted[i] = kept[i]
            status[unique] = _deliver(packed, unique, kind, target_first, targets, out)
        else:
            while first_rows[part + 1] <= row:
                part, window_end = part + 1, np.int64(-1)
            begin = begins_of_parts[part] + (row - first_rows[part]) * row_bytes
            if begin + row_bytes > window_end:
                align = aligns[part]
                window_end = (begin + row_bytes + align - 1) // align * align
                job_first[jobs], job_parts[jobs] = missed, part
                jobs += 1
            begins[unique], status[unique] = begin, CUT_SHORT
            misses[missed] = unique
            missed += 1
        unique += 1
    job_first[jobs] = missed
    return unique, missed, jobs


@kernel()
def publish(lanes, lane, number, jobs):  # type: ignore[no-untyped-def]
    """Let readers at a lane whose pointers are set: first the limit, then the ticket, which makes both valid."""
    lanes[lane * FIELDS + DONE] = 0
    lanes[lane * FIELDS + READS] = 0
    lanes[lane * FIELDS + BYTES] = 0
    lanes[lane * FIELDS + END_NS] = 0
    atomic_swap(lanes, lane * FIELDS + LIMIT, (number << 32) | jobs)
    atomic_swap(lanes, lane * FIELDS + TICKET, number << 32)


@kernel()
def cancel(lanes, lane):  # type: ignore[no-untyped-def]
    """Hand out no more jobs of a lane; its end is written down when those under way are done. Twice is harmless."""
    limit = lanes[lane * FIELDS + LIMIT]
    jobs = limit & _COUNT
    left = jobs - min(atomic_swap(lanes, lane * FIELDS + TICKET, limit) & _COUNT, jobs)
    if left > 0 and atomic_add(lanes, lane * FIELDS + DONE, left) + left == jobs:
        lanes[lane * FIELDS + END_NS] = monotonic_ns()


# Reading


@kernel()
def _fill(descriptor, address, begin, wanted, size, align):  # type: ignore[no-untyped-def]
    """Read a window until its first ``wanted`` bytes are there or the file ends; (bytes or -errno, reads)."""
    reached, at, reads = 0, 0, 0
    while reached < wanted:
        got = read_at(descriptor, address + at, size - at, begin + at)
        reads += 1
        if got < 0:
            number = error_number()
            if number == _INTERRUPTED:
                continue
            return -np.int64(number), reads
        if at + got <= reached:
            break
        reached = at + got
        at = reached - reached % align  # a direct read goes on at whole blocks only
    return np.int64(reached), reads


@kernel()
def _run_job(lanes, lane, job, descriptors, aligns, row_bytes, row_values, kind, address):  # type: ignore[no-untyped-def]
    """One window: read it, and deliver its rows or say why they did not come. Returns (reads, bytes)."""
    base = lane * FIELDS
    unique = lanes[base + UNIQUE]
    job_first = carray(pointer(lanes[base + JOB_FIRST]), unique + 1, np.int64)
    misses = carray(pointer(lanes[base + MISSES]), unique, np.int64)
    begins = carray(pointer(lanes[base + BEGINS]), unique, np.int64)
    status = carray(pointer(lanes[base + STATUS]), unique, np.int64)
    target_first = carray(pointer(lanes[base + TARGET_FIRST]), unique + 1, np.int64)
    packed = carray(pointer(lanes[base + PACKED]), (unique, row_bytes), np.uint8)
    targets = carray(pointer(lanes[base + TARGETS]), target_first[unique], np.int64)
    out = carray(pointer(lanes[base + OUT]), (lanes[base + OUT_ROWS], row_values), np.float32)
    part = carray(pointer(lanes[base + JOB_PARTS]), unique, np.int64)[job]
    first, last = job_first[job], job_first[job + 1]
    align = aligns[part]
    window = begins[misses[first]] // align * align
    wanted = begins[misses[last - 1]] + row_bytes - window
    size = (wanted + align - 1) // align * align
    got, reads = _fill(descriptors[part], address, window, wanted, size, align)
    buffer = carray(pointer(address), size, np.uint8)
    for m in range(first, last):
        u = misses[m]
        at = begins[u] - window
        if got >= at + row_bytes:
            row = packed[u]
            for i in range(row_bytes):
                row[i] = buffer[at + i]
            status[u] = _deliver(packed, u, kind, target_first, targets, out)
        else:
            status[u] = -got if got < 0 else CUT_SHORT
            _deliver_zeros(u, target_first, targets, out)
    return reads, max(got, np.int64(0))


@kernel()
def _take_job(lanes, lane, ends, descriptors, aligns, row_bytes, row_values, kind, address):  # type: ignore[no-untyped-def]
    """Take and do one job of a lane; whether there was one. Who does the last one writes down the end."""
    base = lane * FIELDS
    if lanes[base + TICKET] >= lanes[base + LIMIT]:
        return False
    ticket = atomic_add(lanes, base + TICKET, 1)
    limit = lanes[base + LIMIT]
    if ticket >> 32 != limit >> 32 or ticket >= limit:
        return False
    reads, size = _run_job(lanes, lane, ticket & _COUNT, descriptors, aligns, row_bytes, row_values, kind, address)
    atomic_add(lanes, base + READS, reads)
    atomic_add(lanes, base + BYTES, size)
    if atomic_add(lanes, base + DONE, 1) + 1 == limit & _COUNT:
        lanes[base + END_NS] = monotonic_ns()
        write_from(ends[lane], address, 1)
    return True


@kernel()
def serve(wake, ends, lanes, descriptors, aligns, row_bytes, row_values, kind, buffer):  # type: ignore[no-untyped-def]
    """What a reader does all its life: for every byte of the pipe ``wake`` take jobs until there are none.

    ends int64 [2] are pipes, one a lane; buffer uint8 has room for an aligned window. Returns when the pipe closes, or
    at the first byte after ``lanes[STOP]`` was set.
    """
    address = (buffer.ctypes.data + 4095) // 4096 * 4096
    while True:
        got = read_into(wake, address, 1)
        if got < 0 and error_number() == _INTERRUPTED:
            continue
        if got != 1 or lanes[STOP] != 0:
            return
        while _take_job(lanes, URGENT, ends, descriptors, aligns, row_bytes, row_values, kind, address) or _take_job(
            lanes, AHEAD, ends, descriptors, aligns, row_bytes, row_values, kind, address
        ):
            pass
