"""Checks that a wheel holds the five packages with every file of theirs that git knows, a library of compiled kernels
for each kind of processor of this machine's family, and nothing else."""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernels.cpu.targets import targets_of

PACKAGES = ("launcher", "moeserve", "radix_cache", "experts", "kernels")


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    tracked = subprocess.run(["git", "ls-files", "--", *PACKAGES], capture_output=True, text=True, check=True)
    libraries = {f"kernels/cpu/compiled/{target.name}.so" for target in targets_of(platform.machine())}
    expected = set(tracked.stdout.split()) | libraries
    if missing := expected - held:
        sys.exit(f"the wheel lacks {sorted(missing)}")
    if foreign := held - expected:
        sys.exit(f"the wheel holds {sorted(foreign)}")
    if not licences:
        sys.exit("the wheel lacks the licence")
    print(f"{len(held)} files in {len(PACKAGES)} packages, {len(libraries)} of them libraries of compiled kernels")


if __name__ == "__main__":
    main(sys.argv[1])
