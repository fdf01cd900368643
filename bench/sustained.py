"""What a tile costs at the clocks that it can hold: each alone for half a second, beside a rotation.

    python bench/sustained.py [FILE]      (default: bench/results/sustained.jsonl)

A GPU at its power limit lowers its clocks, and in a rotation of a few milliseconds all members pay for what one draws.
"ms" is the median of such a rotation, "tenths_us" the time of a call in each tenth of half a second of nothing else,
"sm_mhz" and "watts" are the driver's towards its end, "mj" is the energy of a call (by the driver's counter, which is
coarse: within some 10 %). The tile "mm" is torch.mm(out=), before and after all others.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from kernels import M, plain_products

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from codegen_cases import norm_producer, random_inputs, swiglu, swiglu_backward, token_scale  # noqa: E402

from coda_inductor.codegen import legality, target  # noqa: E402
from coda_inductor.core import blocks  # noqa: E402
from coda_inductor.core.region import Region  # noqa: E402
from coda_inductor.kernels import launch  # noqa: E402
from coda_inductor.kernels.prebuild import Job, prebuild  # noqa: E402
from coda_inductor.measure import timing, tune  # noqa: E402

SPAN_S = 0.5
SM_CLOCK = 1  # NVML_CLOCK_SM
D, FF = 2048, 8192


class Driver:
    """Counters of the first GPU, as NVML names them; -1 where the driver does not say."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.nvml.nvmlInit_v2()
        self.gpu = ctypes.c_void_p()
        self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.gpu))

    def read(self, name: str, *arguments: int) -> int:
        """The value that the function `name` gives."""
        value = ctypes.c_ulonglong()
        failed = getattr(self.nvml, name)(self.gpu, *arguments, ctypes.byref(value))
        return -1 if failed else value.value


def alone(call: Callable[[], object], ms: float, driver: Driver) -> dict[str, Any]:
    """Half a second of nothing but `call`, which takes about `ms`."""
    count, marks = max(4, int(SPAN_S / (ms / 1e3))), list[tuple[int, torch.cuda.Event]]()

    def mark(i: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((i, event))

    torch.cuda.synchronize()
    start_s, before = time.perf_counter(), driver.read("nvmlDeviceGetTotalEnergyConsumption")
    for i in range(count):
        call()
        if i % max(1, count // 10) == 0:
            mark(i)
    mark(count - 1)
    time.sleep(max(0.0, SPAN_S * 0.9 - (time.perf_counter() - start_s)))
    clock, power = driver.read("nvmlDeviceGetClockInfo", SM_CLOCK), driver.read("nvmlDeviceGetPowerUsage")
    torch.cuda.synchronize()
    spent = driver.read("nvmlDeviceGetTotalEnergyConsumption") - before
    tenths = [a.elapsed_time(b) / (j - i) for (i, a), (j, b) in pairwise(marks) if j > i]
    found = {"tenths_us": [round(t * 1e3) for t in tenths], "sm_mhz": clock, "watts": power / 1e3}
    return found | {"mj": round(spent / count, 2)}


def rows(name: str, region: Region, driver: Driver) -> Iterator[dict[str, Any]]:
    """The bare product, every tile, the bare product again."""
    kernel, inputs = launch.kernel(region.text), random_inputs(region, M, "cuda")
    configs, plain = legality.candidates(region, M), plain_products(region, inputs)
    outs, calls = blocks.outputs(region, inputs), {"mm": plain}
    for config in configs:
        if "why" not in tune.examine(kernel, config, inputs, outs, max_stack=1 << 20):
            calls[str(config)] = lambda c=config: kernel.run_in(c, inputs, outs)  # type: ignore[misc]
    turns = dict(zip(calls, timing.by_turns([*calls.values()], 11, timing.launching([*calls.values()])), strict=True))
    alone(plain, turns["mm"], driver)  # to the power limit
    for tile in (*calls, "mm"):
        times = alone(calls[tile], turns[tile], driver)
        yield {"case": name, "tile": tile, "ms": turns[tile], **times}


def main() -> None:
    """The Regions of a Llama layer of width 2048, of which SwiGLU's backward is the heaviest."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "sustained.jsonl"
    work = {
        "o": norm_producer(D, D), "gate|up": swiglu(FF, D), "down": norm_producer(D, FF),
        "SwiGLU's backward": swiglu_backward(FF, D), "up after a norm": token_scale(FF, D),
    }  # fmt: skip
    prebuild([Job(region, config) for region in work.values() for config in legality.candidates(region, M)])
    driver, said = Driver(), {"m": M, "machine": torch.cuda.get_device_name(), "versions": target.versions()}
    said["command"] = "python bench/sustained.py"
    with path.open("a") as file:
        for name, region in work.items():
            for row in rows(name, region, driver):
                print(row, flush=True)
                print(json.dumps(row | said), file=file, flush=True)


if __name__ == "__main__":
    main()
