"""A compiled kernel's registers and spills, read from the machine code itself: no CUDA tools, no GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAGIC = b"\x7fELF\x02\x01\x01"
EM_CUDA = 190  # ELF machine number
FRAME_SIZE = 0x11  # attribute of .nv.info: (symbol, bytes of stack per thread)
REGISTERS = 0x2F  # (symbol, registers per thread)
VALUE_FORMAT = 4  # attributes of this format carry their payload after a 16-bit size


def stack_bytes(data: bytes) -> int | None:
    """The largest stack frame, bytes per thread, of the CUDA images inside an object file; None if it has none.
    Kernels of ours have no local arrays, so a frame means spilled registers."""
    return _largest(data, FRAME_SIZE)


def registers(data: bytes) -> int | None:
    """The registers per thread that the CUDA images inside an object file start with; None if it has none. The warp
    groups that multiply then take more (setmaxregister)."""
    return _largest(data, REGISTERS)


def _largest(data: bytes, attribute: int) -> int | None:
    """The largest value of a kernel attribute in the CUDA images inside `data`."""
    return max((value for image in _cuda_images(data) for value in _values(image, attribute)), default=None)


def _cuda_images(data: bytes) -> Iterator[bytes]:
    """Every ELF file for CUDA inside `data`, from its start to the end of `data`."""
    start = data.find(MAGIC)
    while start >= 0:
        if len(data) >= start + 64 and struct.unpack_from("<H", data, start + 18)[0] == EM_CUDA:
            yield data[start:]
        start = data.find(MAGIC, start + 1)


def _values(image: bytes, wanted: int) -> Iterator[int]:
    """The values of the attribute `wanted` in the sections named .nv.info*."""
    table, entry, count, names = (*struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HHH", image, 58))
    headers = [struct.unpack_from("<IIQQQQ", image, table + entry * i) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        start = strings + name
        if image[start : start + 8] == b".nv.info":
            yield from _attributes(image[offset : offset + size], wanted)


def _attributes(section: bytes, wanted: int) -> Iterator[int]:
    at = 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == VALUE_FORMAT:
            if attribute == wanted and size == 8:
                yield struct.unpack_from("<I", section, at + 4)[0]
            at += size
