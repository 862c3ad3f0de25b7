"""Predictions between two hosts: `python bench/links.py --measure DIR`, then `python bench/links.py --judge DIR`.

--measure: two hosts of network namespaces with a link of 100 Mbit/s, 1 Gbit/s and as it comes, 1 + 1 and 2 + 2 ranks;
bench/scaling.py (weak, K = 1 and 8) on the nets of bench/nets, a file for each in DIR. Needs root. --judge: for each
link, calibrate on the files of the two others and predict its rounds; prints the median error and every row.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests/program"))

from two_hosts import TwoHosts  # noqa: E402

from shoal.comm.library import loaded  # noqa: E402
from shoal.jobs.launch import environment, find_mpiexec  # noqa: E402
from shoal.report.calibrate import calibrate, points, predicted_s  # noqa: E402

LINKS = {"open": None, "1gbit": 1.0, "100mbit": 0.1}
BURSTS = {"100mbit": "16kb", "1gbit": "128kb", "open": "10mb"}
"""about a millisecond's worth: what has come to a rest passes unshaped"""
OPEN = "100gbit"
"""what the link is shaped to where it should not be felt"""
LAYOUTS = {"1+1": (1, "1,2"), "2+2": (2, "1,4")}
NETS = {"mlp": 4, "mlp-s": 10, "convnet-s": 8}
"""the rounds of a visit"""
LIMIT_S = 280
TARGET = 0.15


def wrapped(hosts: TwoHosts, per_host: int, command: list[str]) -> list[str]:
    """The command on h1, with ranks on both hosts."""
    where = f"h1:{per_host},h2:{per_host}"
    options = ["--mca", "plm_ssh_agent", str(hosts.agent), "--host", where, "--map-by", "slot"]
    return [str(hosts.agent), "h1", shlex.join([command[0], *options, *command[1:]])]


def measure(folder: Path, link: str, repeats: int) -> None:
    """One link: a file for each layout and net."""
    library, gbit = loaded(), LINKS[link]
    with TwoHosts(link if gbit else OPEN, BURSTS[link]) as hosts, tempfile.TemporaryDirectory() as own:
        for layout, (per_host, ranks) in LAYOUTS.items():
            for net in NETS:
                out = folder / f"{link}_{layout}_{net}"
                script = [
                    str(HERE / "scaling.py"),
                    str(HERE / "nets" / f"{net}.toml"),
                    "--modes",
                    "weak",
                    "--steps",
                    "1,8",
                ]
                script += ["--ranks", ranks, "--repeats", str(repeats), "--rounds", str(NETS[net]), "--out", str(out)]
                script += ["--link-gbit", str(gbit)] if gbit else []
                command = [str(find_mpiexec(library)), "-n", str(2 * per_host), sys.executable, "-m", "shoal", "script"]
                environ = {**environment(library, os.environ, Path(own)), "OMPI_MCA_mpi_yield_when_idle": "1"}
                subprocess.run(
                    wrapped(hosts, per_host, [*command, "--", *script]), env=environ, timeout=LIMIT_S, check=True
                )
                shutil.copy(out / "scaling.jsonl", f"{out}.jsonl")
                shutil.rmtree(out)


def judge(folder: Path) -> bool:
    """Print how well each link is predicted by the others; whether all medians are within the target."""
    fine, files = True, sorted(folder.glob("*_*_*.jsonl"))
    for link in LINKS:
        theirs = [path for path in files if not path.name.startswith(f"{link}_")]
        ours = [path for path in files if path.name.startswith(f"{link}_")]
        found = calibrate(points(theirs))
        print(f"\n{link}: from the others: " + ", ".join(f"{k} {v:.3g}" for k, v in found.values.items()))
        asked = [point for point in points(ours) if point.ranks > 1]
        errors = np.array([predicted_s(point, found.values) / point.round_s - 1 for point in asked])
        for point, error in zip(asked, errors, strict=True):
            name = Path(point.file).stem.split("_")
            measured = f"{1e3 * point.round_s:9.2f} ms"
            print(f"  {name[1]:5}{name[2]:11}K = {point.steps}  {point.algorithm:14}{measured} {100 * error:+6.1f}%")
        middle = float(np.median(abs(errors)))
        fine &= middle <= TARGET
        print(f"  median error {100 * middle:.1f}% (target {100 * TARGET:g}%)")
    return fine


def main() -> int:
    """Measure or judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for link in options.links if options.measure else ():
        measure(options.folder, link, options.repeats)
    return 0 if not options.judge or judge(options.folder) else 1


if __name__ == "__main__":
    raise SystemExit(main())
