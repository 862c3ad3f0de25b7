"""shoal installs with and without a C compiler, and says which form of the kernels it has and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import kernels
from shoal.kernels.compiled import cpu

ROOT = Path(__file__).resolve().parents[2]


def backing_after_install(folder: Path, **environment: str) -> str:
    """What `backing` says in a fresh installation of a copy of this tree, made with these variables set."""
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("src", "kernels"):
        ignore = shutil.ignore_patterns("*.so", "not_compiled.txt", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "jobs", folder / "jobs", symlinks=True)
    target, variables = folder / "target", {**os.environ, **environment}
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), str(folder)]
    made = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    if "No matching distribution found" in made.stderr:
        pytest.skip("no package index can be reached for the build's own requirements")
    assert made.returncode == 0, made.stderr
    code = "import shoal.kernels as k; print(k.__file__); print(k.backing())"
    variables["PYTHONPATH"] = str(target)
    said = subprocess.run(
        [sys.executable, "-c", code], env=variables, cwd=folder / "target", capture_output=True, text=True, check=True
    )
    where, backing = said.stdout.splitlines()
    assert Path(where).is_relative_to(target)
    return backing


def test_installs_without_a_compiler_and_says_so(tmp_path: Path) -> None:
    backing = backing_after_install(tmp_path, CC="/bin/false")
    assert backing == "NumPy twins (no C compiler was found when shoal was installed)"


@pytest.mark.skipif(cpu is None, reason=f"nothing compiles here: {kernels.backing()}")
def test_portable_kernels_on_request(tmp_path: Path) -> None:
    backing = backing_after_install(tmp_path, SHOAL_PORTABLE="1")
    assert backing.startswith("C (") and backing.endswith(", portable)")
