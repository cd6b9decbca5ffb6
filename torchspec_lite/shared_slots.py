"""Memory that a sender and a receiver on one host share: the sender writes a sample once, the receiver reads it there.

The memory is anonymous (`memfd_create`) and reached through `/proc/PID/fd/FD`, so it has no name in /dev/shm: the
kernel frees it when the last of both processes is gone, however they die, and /dev/shm's size limit in containers does
not apply. Only the same user on the same host, in the same process namespace, can open it. It is sealed against
shrinking, so that no peer can make the other fault. Pages are reused lowest first: after the first round no page
faults, which cost more than copying.
"""

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass

NAME = "torchspec-lite"
ALIGN = 64
NONCE = 32  # bytes at the start of the memory, to know it again from the other side
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # linux/fcntl.h
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1, 2, 4
SEALS = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW


def host_identity() -> str:
    """Names this boot of this host; two processes with the same one can try shared memory."""
    with open("/proc/sys/kernel/random/boot_id") as stream:
        return stream.read().strip()


@dataclass(frozen=True)
class Slot:
    offset: int
    size: int


class Slots:
    """Memory handed out in slots, lowest first, so that pages are touched once and then reused. Not thread-safe."""

    def __init__(self, memory: memoryview):
        self.size = memory.nbytes
        self._memory = memory
        self._free = [Slot(ALIGN, self.size - ALIGN)]  # by offset, neighbours merged

    def allocate(self, size: int) -> Slot | None:
        """The lowest free slot of that many bytes, or None."""
        size = _aligned(size)
        for i, free in enumerate(self._free):
            if free.size >= size:
                rest = Slot(free.offset + size, free.size - size)
                self._free[i : i + 1] = [rest] if rest.size else []
                return Slot(free.offset, size)
        return None

    def free(self, slot: Slot) -> None:
        """Give a slot back. The caller makes sure that nobody reads it any more."""
        i = next((i for i, free in enumerate(self._free) if free.offset > slot.offset), len(self._free))
        self._free.insert(i, slot)
        for j in (i, i - 1):
            if 0 <= j < len(self._free) - 1:
                left, right = self._free[j], self._free[j + 1]
                if left.offset + left.size == right.offset:
                    self._free[j : j + 2] = [Slot(left.offset, left.size + right.size)]

    def free_bytes(self) -> int:
        return sum(free.size for free in self._free)

    def views(self, slot: Slot, lengths: tuple[int, ...]) -> list[memoryview]:
        return layout(self._memory, slot.offset, lengths)


def private_slots(size: int) -> Slots:
    """Slots of this process alone. Pages are taken from the system when they are first written."""
    return Slots(memoryview(mmap.mmap(-1, ALIGN + _aligned(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))


class SharedSlots(Slots):
    """The sender's side: slots in memory that a receiver on this host can map."""

    def __init__(self, size: int):
        size = ALIGN + _aligned(size)
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, F_ADD_SEALS, SEALS)
        super().__init__(memoryview(mmap.mmap(self.fd, size)))
        self.nonce = secrets.token_bytes(NONCE)
        self._memory[:NONCE] = self.nonce

    def close(self) -> None:
        """Close the file; the memory goes when the last view on either side goes."""
        os.close(self.fd)


def slot_bytes(lengths) -> int:
    """Bytes of a slot that holds frames of these lengths."""
    return sum(_aligned(length) for length in lengths)


def layout(memory: memoryview, offset: int, lengths) -> list[memoryview]:
    """Frames one after the other, each aligned. Raises ValueError when they do not lie inside the memory."""
    if offset % ALIGN or offset < ALIGN or offset + slot_bytes(lengths) > memory.nbytes:
        raise ValueError("frames lie outside the shared memory")
    views = []
    for length in lengths:
        views.append(memory[offset : offset + length])
        offset += _aligned(length)
    return views


def attach(pid: int, fd: int, size: int, nonce: str) -> memoryview | None:
    """The receiver's side: the memory that a sender offers, or None when it cannot be reached or is not what it says.

    Nothing but a sealed memfd of this project, of the stated size, is opened; the numbers come from a peer.
    """
    path = f"/proc/{int(pid)}/fd/{int(fd)}"
    try:
        if os.readlink(path) != f"/memfd:{NAME} (deleted)":
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None  # another namespace or user, or a process that is gone: frames go over the socket instead
    try:
        if os.fstat(file).st_size != size or fcntl.fcntl(file, F_GET_SEALS) & SEALS != SEALS:
            return None
        memory = memoryview(mmap.mmap(file, size))
    finally:
        os.close(file)
    return memory if bytes(memory[:NONCE]).hex() == nonce else None


def _aligned(size: int) -> int:
    return size + -size % ALIGN
