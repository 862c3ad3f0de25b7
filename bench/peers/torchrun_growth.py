"""The same growth under torchrun's elastic agent (gloo): `python bench/peers/torchrun_growth.py [--repeats 3]`.

A job of one worker trains; a second agent of one worker joins, and leaves again (SIGTERM). The agents restart all
workers, which load what they need, meet again and go on. `ms` is from the event (the start of the second agent; the
signal) to the end of the first step at the new size, `stall_ms` from the last step at the old size to there: the time
in which nothing is trained. In a venv with torch; all on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FEATURES = 10_000
STEP_S, LIMIT_S = 0.002, 120.0


def worker(log: Path) -> None:
    """Train for ever; note each new size after its first step. Raises what gloo raises when the other has gone."""
    import torch
    import torch.distributed

    last = max((float(path.read_text() or 0) for path in log.parent.glob("last-*")), default=0.0)
    own = os.open(log.parent / f"last-{os.getpid()}", os.O_CREAT | os.O_WRONLY)

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, noted = torch.ones(4, FEATURES), False
    while True:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        now = time.time()
        if not noted and rank == 0:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"size": size, "time": now, "stall_s": now - last}) + "\n")
        noted = True
        os.pwrite(own, f"{now:<20}".encode(), 0)
        time.sleep(STEP_S)


def agent(log: Path, port: int) -> subprocess.Popen[bytes]:
    """torchrun of one worker; the shortest waits it can be given."""
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100", "--monitor-interval=0.05"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=growth"]
    patience = ["--rdzv-conf=last_call_timeout=1,join_timeout=60"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *meeting, *patience, str(HERE), "worker", str(log)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=(log.parent / f"agent-{time.monotonic_ns()}.txt").open("wb"),
        start_new_session=True,
    )


def wait_for(log: Path, size: int, since: float) -> tuple[float, float]:
    """Seconds from `since` to the first step at this size, and since the last one before."""
    while time.time() < since + LIMIT_S:
        for line in log.read_text().splitlines() if log.exists() else ():
            event: dict[str, Any] = json.loads(line)
            if event["size"] == size and event["time"] > since:
                return event["time"] - since, event["stall_s"]
        time.sleep(0.02)
    texts = "\n".join(path.read_text(errors="replace")[-1500:] for path in log.parent.glob("agent-*.txt"))
    sys.exit(f"no step at size {size} within {LIMIT_S} s\n{texts}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End an agent and its worker."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        process.kill()
    process.wait()


def measure(repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds from the event, and of the stall, of each growth and shrinkage."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    times: dict[str, list[tuple[float, float]]] = {"growth": [], "shrinkage": []}
    with tempfile.TemporaryDirectory() as folder:
        log, began = Path(folder, "steps.jsonl"), time.time()
        agents = [agent(log, port)]
        try:
            wait_for(log, 1, began)
            for _ in range(repeats):
                time.sleep(1)
                event = time.time()
                agents.append(agent(log, port))
                times["growth"].append(wait_for(log, 2, event))
                time.sleep(1)
                event = time.time()
                stop(agents.pop())
                times["shrinkage"].append(wait_for(log, 1, event))
        finally:
            while agents:
                stop(agents.pop())
    return times


def main() -> None:
    """Measure, or be a worker."""
    if sys.argv[1:2] == ["worker"]:
        return worker(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import torch

    times = measure(options.repeats)
    header = {"bench": "peers/torchrun_growth", "torch": torch.__version__, "repeats": options.repeats}
    print(json.dumps(header))
    for what, seconds in times.items():
        ms, stall_ms = ([round(1e3 * one) for one in column] for column in zip(*seconds, strict=True))
        row = {"event": what, "ms": statistics.median(ms), "stall_ms": statistics.median(stall_ms)}
        print(json.dumps({**row, "all_ms": ms, "all_stall_ms": stall_ms}), flush=True)
    return None


if __name__ == "__main__":
    main()
