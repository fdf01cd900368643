"""Doors between the kernels of a line: a word of GPU memory for each but the first, 0 while it is closed.

What PTX promises of memory written by the kernels before, it promises to a kernel that waits for the one before it. Of
a line only the first does before it reads (device._Overlapping); it then opens the next one's door by a release, each
block of that passes it by an acquire and opens the door after it in turn, and the last block closes its own. So what
was visible to the first is visible to all, by PTX's own order of memory, and every door is closed when a line has run:
a CUDA graph that holds it can be replayed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

WORDS = 1 << 14  # of a device
WORD = 4  # bytes

_lock = threading.Lock()
_devices: dict[torch.device, _Doors] = {}


@dataclass(slots=True)
class _Doors:
    """Those of a device: of each stream the same for one line after the other, of each captured line its own, since a
    graph is replayed on any stream."""

    words: Tensor
    used: int = 0
    of_streams: dict[int, list[int]] = field(default_factory=dict)

    def new(self, count: int) -> list[int]:
        """Addresses that nobody has yet, none if there are too few."""
        if self.used + count > WORDS:
            return []
        first = self.words.data_ptr() + WORD * self.used
        self.used += count
        return [first + WORD * i for i in range(count)]


def doors(device: torch.device, count: int) -> list[int]:
    """The addresses of `count` closed doors for a line on the device's current stream; none if there are none left,
    or, while a stream is captured, none yet: the kernels then run one after the other."""
    if count < 1:
        return []
    capturing, stream = _stream(device)
    with _lock:
        if device not in _devices:
            if capturing:
                return []
            _devices[device] = _Doors(torch.zeros(WORDS, dtype=torch.int32, device=device))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # other streams do not wait for this one
        own = _devices[device]
        if capturing:
            return own.new(count)
        found = own.of_streams.setdefault(stream, [])
        if len(found) < count:
            found += own.new(count - len(found))
        return found[:count] if len(found) >= count else []


def forget(device: torch.device) -> None:
    """A line has failed amid its launches: a door may stay open, and the stream's are used no more."""
    with _lock:
        if device in _devices:
            _devices[device].of_streams.pop(_stream(device)[1], None)


def _stream(device: torch.device) -> tuple[bool, int]:
    """(is the current stream of the device captured, its handle)."""
    if device.type != "cuda":
        return False, 0
    return torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(device).cuda_stream
