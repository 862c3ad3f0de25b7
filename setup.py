"""Builds the compiled kernels, if it can: where there is no compiler, shoal installs and the NumPy twins run.

The kernels are compiled for the CPU of this machine; with SHOAL_PORTABLE=1 in the environment, for any CPU of
its architecture. Why there are none is written beside them, for `shoal info`. All else is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/cpu")
REASON = "not_compiled.txt"


def works(compiler: list[str], source: str, flags: list[str]) -> bool:
    """Whether the compiler makes an object file of `source` with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "try.c")
        path.write_text(source, encoding="utf-8")
        command = [*compiler, *flags, "-Werror", "-c", str(path), "-o", str(path.with_suffix(".o"))]
        try:
            return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False


def cpu_flags(compiler: list[str]) -> list[str]:
    """The flag that makes the compiler use all that this machine's CPU has, or none."""
    if os.environ.get("SHOAL_PORTABLE", "") not in ("", "0"):
        return []
    names = ["-march=native", "-mcpu=native"]
    if platform.machine().startswith("ppc"):
        names.reverse()
    return next(([name] for name in names if works(compiler, "int x;\n", [name])), [])


class BuildKernels(build_ext):
    """Compiles the extension, or leaves a sentence that says why not."""

    def run(self) -> None:
        self.force = True  # flags change without a file changing
        reason = self._why_not()
        if not reason:
            try:
                super().run()
            except Exception as error:  # whatever stops a compiler must not stop the installation
                reason = f"the C compiler failed when shoal was installed: {type(error).__name__}"
        for folder in self._folders():
            (folder / REASON).unlink(missing_ok=True)
            if reason:
                for stale in folder.glob("_cpu.*.so"):
                    stale.unlink()
                (folder / REASON).write_text(reason + "\n", encoding="utf-8")

    def _folders(self) -> list[Path]:
        """Where the package is: the build's copy, and for an editable install the source."""
        source = Path(self.get_finalized_command("build_py").get_package_dir("shoal.kernels"))
        built = Path(self.build_lib, "shoal", "kernels")
        return [folder for folder in ([source] if self.inplace else [built]) if folder.is_dir()]

    def _why_not(self) -> str:
        command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        if not works(command, "int x;\n", []):
            return "no C compiler was found when shoal was installed"
        include = [f"-I{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}]
        if not works(command, "#include <Python.h>\n", include):
            return "Python's headers were not found when shoal was installed"
        flags = cpu_flags(command)
        extension = self.extensions[0]
        extension.extra_compile_args += flags
        extension.define_macros.append(("SHOAL_FLAGS", f'"{" ".join(flags) or "portable"}"'))
        return ""


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "shoal.kernels._cpu",
            sources=sorted(map(str, SOURCES.glob("*.c"))),
            depends=sorted(map(str, [*SOURCES.glob("*.h"), *SOURCES.glob("*.inc")])),
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-fno-trapping-math"],
        )
    ],
)
