"""Puts compiled kernels into the wheel, one library for each kind of processor; pyproject.toml says all the rest.

An editable installation carries none: there they are compiled on first use.
"""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from kernels.cpu.build import KernelBuildError, build_library
from kernels.cpu.targets import targets_of


class BuildWithKernels(build_py):
    """Copies the packages and adds a library for each target that the compiler knows."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "kernels" / "cpu" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        for target in targets_of(platform.machine()):
            try:
                shutil.copy(build_library(target), folder / f"{target.name}.so")
            except KernelBuildError as error:
                self.warn(f"the wheel has no kernels for {target.name}: {error}")


class OfOneMachine(Distribution):
    """Is built for one kind of machine, though setuptools compiles nothing of it."""

    def has_ext_modules(self) -> bool:
        return True


class WheelForAnyPython(bdist_wheel):
    """Names the machine but no version of Python: the libraries know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(distclass=OfOneMachine, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForAnyPython})
