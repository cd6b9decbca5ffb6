"""Memory of both ends of the stream while a trainer is ten times slower than its targets and another target floods.

`python -m benchmarks.backpressure --json [--seconds 600]`. Two targets make samples as fast as `RATE`, one over shared
memory and one over frames; the trainer takes a tenth of that; a third program connects again and again and sends
samples without credit. Peaks are the kernel's (VmHWM) above each process's memory at rest. The receiver's holds pages
that it maps of the target that shares its memory, and which are in that target's budget; the peak of its own memory
alone, looked at a hundred times a second, is given beside it. At the end the trainer empties the stream, and every
sample must have come once.
"""

import argparse
import json
import multiprocessing
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.machine import machine
from benchmarks.stream import make_sample
from torchspec_lite import control
from torchspec_lite.sample import Expectation
from torchspec_lite.stream import Receiver, Sender, StreamTimeout
from torchspec_lite.wire import VERSION, encode

TOKENS, HIDDEN = 512, 576  # 2.4 MB a sample
RATE = 20.0  # samples a second that each target would make
SLOWER = 10
RECEIVER_BUDGET = 192 * 2**20
SENDER_BUDGET = 96 * 2**20
LIMIT_S = 120.0


def reset_peak() -> int:
    """Forget the peak; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Peaks:
    """The highest own (anonymous) memory of this process above that at its making, and what all of it consisted of when
    there was most: `RssAnon`, `RssShmem` (mapped of a target) and `RssFile` (programs and libraries)."""

    PARTS = ("RssAnon", "RssShmem", "RssFile")

    def __init__(self):
        self._rest, self.own, self.parts = self._look(), 0, dict.fromkeys(self.PARTS, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _look(self) -> dict[str, int]:
        return {part: _status(part) for part in self.PARTS}

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            now = {part: nbytes - self._rest[part] for part, nbytes in self._look().items()}
            self.own = max(self.own, now["RssAnon"])
            self.parts = max(self.parts, now, key=lambda parts: sum(parts.values()))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def target(endpoint: str, name: str, shared_memory: bool, seconds: float, pipe) -> None:
    torch.set_num_threads(1)
    base = make_sample(TOKENS, HIDDEN)
    sender = Sender(endpoint, name, SENDER_BUDGET, wait_s=LIMIT_S, shared_memory=shared_memory)
    sender.send(replace(base, id=f"{name}-warm-up"))
    sender.flush(LIMIT_S)
    rest = reset_peak()
    started, made = time.monotonic(), 0
    pace = threading.Event()  # never set: waits are the target's own working time
    while (now := time.monotonic() - started) < seconds:
        pace.wait(max(0.0, made / RATE - now))
        sender.send(replace(base.clone(), id=f"{name}-{made}", ordinal=made))
        made += 1
    sender.flush(LIMIT_S)
    pipe.send({"made": made, "peak": _status("VmHWM") - rest, "blocked_s": sender.stats().blocked_s})
    pipe.recv()
    sender.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)  # ZMTP 3.1, RFC 37
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def flood(endpoint: str, seconds: float, pipe) -> None:
    """Connect, send samples without credit until cut off, and again; by hand, since ZeroMQ's own client may abort when
    it is cut off in the middle of a message."""
    encoded = encode(make_sample(TOKENS, HIDDEN))
    encoded.seal()
    frames = [control.pack(control.Data(1)), *map(bytes, encoded.frames)]
    message = b"".join(b"\x03" + len(frame).to_bytes(8) + frame for frame in frames[:-1])
    message += b"\x02" + len(frames[-1]).to_bytes(8) + frames[-1]
    host, port = endpoint.removeprefix("tcp://").split(":")
    until, connections, sent = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        connections += 1
        hello = control.pack(control.Hello(VERSION, "flood", f"flood-{connections}", 1, "", 0, 0, 0, ""))
        try:
            with socket.create_connection((host, int(port)), 5) as connection:
                connection.sendall(GREETING + READY)
                answer = b""
                while b"READY" not in answer and (piece := connection.recv(4096)):
                    answer += piece
                if connections % 2:
                    connection.sendall(b"\x00" + bytes([len(hello)]) + hello)
                while time.monotonic() < until:
                    connection.sendall(message)
                    sent += 1
        except OSError:
            continue  # cut off
    pipe.send({"connections": connections, "samples": sent})


def run(seconds: float) -> dict:
    torch.set_num_threads(1)
    base = make_sample(TOKENS, HIDDEN)
    expect = Expectation(base.fingerprint, base.layer_ids, torch.bfloat16, HIDDEN, TOKENS)
    receiver = Receiver("127.0.0.1", RECEIVER_BUDGET, 4096, expect)
    context = multiprocessing.get_context("spawn")
    children = {}
    for name, function, arguments in (("shared", target, ("shared", True)), ("frames", target, ("frames", False)),
                                      ("flood", flood, ())):
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(receiver.endpoint, *arguments, seconds, theirs), daemon=True)
        process.start()
        theirs.close()  # so that a process that died is noticed
        children[name] = process, ours
    ids = []

    def train() -> None:
        sample = receiver.get(LIMIT_S)
        ids.append(sample.id)
        receiver.release(sample)

    train()
    train()
    rest, peaks = reset_peak(), Peaks()
    started = time.monotonic()
    work = threading.Event()  # never set: waits are the trainer's own working time
    while time.monotonic() - started < seconds:
        train()
        work.wait(SLOWER / (2 * RATE))
        receiver.events()
    reports = {}
    while len(reports) < len(children):
        try:
            sample = receiver.get(0.2)
            ids.append(sample.id)
            receiver.release(sample)
        except StreamTimeout:
            pass
        receiver.events()
        for name, (_, pipe) in children.items():
            if name not in reports and pipe.poll():
                reports[name] = pipe.recv()
    while receiver.stats().waiting_samples:
        train()
    peak = _status("VmHWM") - rest
    peaks.end()
    stats = receiver.stats()
    for name in ("shared", "frames"):
        children[name][1].send("leave")
    for process, _ in children.values():
        process.join(LIMIT_S)
    receiver.close()
    wanted = {f"{name}-{i}" for name in ("shared", "frames") for i in range(reports[name]["made"])}
    wanted |= {"shared-warm-up", "frames-warm-up"}
    sender_peak = max(reports[name]["peak"] for name in ("shared", "frames"))
    return {
        "machine": machine(), "seconds": seconds,
        "receiver_budget_mib": RECEIVER_BUDGET // 2**20, "sender_budget_mib": SENDER_BUDGET // 2**20,
        "receiver_peak_mib": peak // 2**20, "receiver_own_peak_mib": peaks.own // 2**20,
        "receiver_peak_consists_of_mib": {part: nbytes // 2**20 for part, nbytes in peaks.parts.items()},
        "sender_peak_mib": sender_peak // 2**20,
        "ratios": {"receiver_peak_vs_budget": round(peak / RECEIVER_BUDGET, 3),
                   "sender_peak_vs_budget": round(sender_peak / SENDER_BUDGET, 3)},
        "samples": stats.received_samples, "lost": len(wanted - set(ids)), "twice": len(ids) - len(set(ids)),
        "targets_held_back_s": {name: round(reports[name]["blocked_s"], 1) for name in ("shared", "frames")},
        "flood": reports["flood"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    result = run(options.seconds)
    print(json.dumps(result) if options.json else "\n".join(f"{key}: {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
