"""Shared memory: slots that never overlap, are reused, and are reached only by whom they are meant for."""

import os
import random
import signal
import subprocess
import sys

import pytest

from torchspec_lite.shared_slots import ALIGN, NAME, SharedSlots, attach, host_identity, layout, slot_bytes


@pytest.fixture
def slots():
    made = SharedSlots(64 * 1024)
    yield made
    made.close()


def offer(slots: SharedSlots):
    return os.getpid(), slots.fd, slots.size, slots.nonce.hex()


def test_slots_never_overlap_and_all_come_back(slots):
    rng = random.Random(5)
    live = []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            slots.free(live.pop(rng.randrange(len(live))))
        else:
            slot = slots.allocate(rng.randrange(1, 9000))
            live += [slot] if slot else []
        used = sorted((slot.offset, slot.offset + slot.size) for slot in live)
        assert all(end <= start for (_, end), (start, _) in zip(used, used[1:], strict=False))
        assert all(ALIGN <= start and end <= slots.size for start, end in used)
        assert slots.free_bytes() == slots.size - ALIGN - sum(slot.size for slot in live)
    for slot in live:
        slots.free(slot)
    assert slots.allocate(64 * 1024).size == 64 * 1024  # one piece again


def test_lowest_memory_is_used_again(slots):
    first, second = slots.allocate(1000), slots.allocate(1000)
    slots.free(first)
    assert slots.allocate(500).offset == first.offset < second.offset


def test_full_memory_gives_nothing(slots):
    assert slots.allocate(64 * 1024 + 1) is None
    assert slots.allocate(64 * 1024)
    assert slots.allocate(1) is None


def test_the_other_side_reads_what_was_written(slots):
    slot = slots.allocate(slot_bytes((100, 200)))
    views = slots.views(slot, (100, 200))
    views[0][:], views[1][:] = b"a" * 100, b"b" * 200
    memory = attach(*offer(slots))
    seen = layout(memory, slot.offset, (100, 200))
    assert (bytes(seen[0]), bytes(seen[1])) == (b"a" * 100, b"b" * 200)
    views[0][0] = 65
    assert seen[0][0] == 65


@pytest.mark.parametrize("offset, lengths", [(0, (8,)), (65, (8,)), (64, (64 * 1024 + 1,)), (2**40, (8,)),
                                             (64, (2**45,)), (64 * 1024 + 64, (1,))])
def test_handles_outside_the_memory_are_refused(slots, offset, lengths):
    with pytest.raises(ValueError, match="outside"):
        layout(attach(*offer(slots)), offset, lengths)


def test_only_what_was_offered_is_opened(slots, tmp_path):
    pid, fd, size, nonce = offer(slots)
    assert attach(pid, fd, size + 64, nonce) is None
    assert attach(pid, fd, size, "00" * 32) is None
    assert attach(2**22 + 1, fd, size, nonce) is None
    assert attach(pid, 2**20, size, nonce) is None
    with open(tmp_path / "secret", "wb+") as other:  # a file that is no shared memory of ours
        other.write(slots.nonce + bytes(100))
        other.flush()
        assert attach(pid, other.fileno(), 132, nonce) is None


def test_memory_that_could_shrink_is_refused(slots):
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, 4096)
    os.pwrite(fd, slots.nonce, 0)
    assert attach(os.getpid(), fd, 4096, slots.nonce.hex()) is None
    os.close(fd)


def test_memory_is_private_and_sealed(slots):
    assert os.fstat(slots.fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(slots.fd, 10)


def test_a_killed_owner_leaves_no_segment_and_its_reader_goes_on():
    before = set(os.listdir("/dev/shm"))
    code = ("import os, sys; from torchspec_lite.shared_slots import SharedSlots; s = SharedSlots(4096);"
            "s.views(s.allocate(64), (64,))[0][:] = b'x' * 64;"
            "print(os.getpid(), s.fd, s.size, s.nonce.hex(), flush=True); sys.stdin.read()")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    pid, fd, size, nonce = child.stdout.readline().split()
    memory = attach(int(pid), int(fd), int(size), nonce)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdin.close()
    child.stdout.close()
    assert bytes(layout(memory, ALIGN, (64,))[0]) == b"x" * 64
    assert attach(int(pid), int(fd), int(size), nonce) is None
    assert set(os.listdir("/dev/shm")) <= before


def test_host_identity_is_one_for_this_boot():
    assert host_identity() == host_identity() != ""
