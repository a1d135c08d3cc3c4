"""Steps in a process of its own, one whenever it is asked: so that sides take turns on one machine.

This file runs in a peer's environment too: it imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time

ROOT = Path(__file__).parent.parent


def peak_bytes() -> int:
    """Most resident memory that this process ever had.

    Not ``ru_maxrss`` on Linux: there a child begins with its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(one for one in status.read_text().splitlines() if one.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def serve(step: Callable[[], object], facts: dict | None = None) -> None:
    """Say ``facts``, then run ``step`` for every line of input and answer its times and the peak memory."""
    print(json.dumps(facts or {}), flush=True)
    for _ in sys.stdin:
        wall, cpu = perf_counter(), process_time()
        step()
        times = {"seconds": perf_counter() - wall, "cpu": process_time() - cpu}
        print(json.dumps({**times, "peak": peak_bytes()}), flush=True)


def answer_jobs(answer: Callable[[dict], dict], facts: dict) -> None:
    """Say ``facts``, then answer every line of input, a job, with what ``answer`` finds and its seconds."""
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        start = perf_counter()
        found = answer(json.loads(line))
        print(json.dumps({**found, "seconds": perf_counter() - start}), flush=True)


class Worker:
    """The other end: a module, or a script, run by some interpreter on the given number of cores."""

    def __init__(self, python: str, module: str, arguments: Sequence[str], threads: int) -> None:
        self.process = subprocess.Popen(
            [python, *(["-P", module] if module.endswith(".py") else ["-m", module]), *arguments],
            cwd=ROOT,
            env=_pinned(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = f"{module} {' '.join(arguments)}"
        self.facts = self._read()

    def step(self) -> dict[str, float]:
        """Times of one step, and the most memory so far."""
        return self.ask("step")

    def ask(self, job: object) -> dict:
        """What it answers to one line of input."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Let it end."""
        self.process.communicate()

    def _read(self) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise ValueError(f"{self.name} ended with status {self.process.wait()}; its error is above")


def _pinned(threads: int) -> dict[str, str]:
    """As it is here, with that many threads, each held to a core of its own where there are as many."""
    more = {"OMP_NUM_THREADS": str(threads)}
    if (os.cpu_count() or 1) >= threads:
        more["GOMP_CPU_AFFINITY"] = " ".join(map(str, range(threads)))
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**found, **more}  # without PYTHONPATH: a peer's script must not import our packages


def torch_bytes(python: str) -> int:
    """Memory that importing torch takes under an interpreter."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); "
        "import torch, worker; print(worker.peak_bytes())"
    )
    return int(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
