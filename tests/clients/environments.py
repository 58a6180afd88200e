"""The clients of `clients.toml` and an environment for each, made once and kept in a cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_STAMP = "installed.json"


class InstallError(Exception):
    """An environment could not be made."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client of `clients.toml`: `requirements` as pip or npm takes them, `seconds` its script may take.

    no_deps: what pip installs without the packages that it depends on. without: what it uninstalls then. context: the
    tokens of context that the client needs, 0 where the demo's are enough. tiny: it asks so much that it is
    served a tiny model of random weights.
    """

    name: str
    title: str
    kind: str
    requirements: tuple[str, ...]
    script: str
    seconds: int = 180
    group: str = "client"
    no_deps: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    context: int = 0
    tiny: bool = False

    @property
    def pins(self) -> list[str]:
        """All that is installed, the client itself first."""
        return [*self.no_deps, *self.requirements]

    @property
    def recipe(self) -> list[str]:
        """All that makes the environment what it is."""
        return [*self.pins, *(f"-{name}" for name in self.without)]

    @property
    def version(self) -> str:
        """The pinned version of the client itself."""
        return self.pins[0].replace("==", "@").rpartition("@")[2]


def load_clients(file: Path = HERE / "clients.toml") -> dict[str, Client]:
    """Return the clients of a file by their names, in its order. Raise KeyError or TypeError at an incomplete one."""
    tables = tomllib.loads(file.read_text())
    return {
        name: Client(
            name=name,
            requirements=tuple(table.pop("requirements")),
            no_deps=tuple(table.pop("no_deps", ())),
            without=tuple(table.pop("without", ())),
            **table,
        )
        for name, table in tables.items()
    }


def cache_folder() -> Path:
    """Return the folder of the environments."""
    named = os.environ.get("MOESERVE_CLIENTS_DIR")
    return Path(named) if named else Path.home() / ".cache" / "moeserve-clients"


@dataclass(frozen=True, slots=True)
class Environment:
    """The folder with a client's packages."""

    client: Client
    folder: Path

    @property
    def programs(self) -> Path:
        """The folder of the environment's own commands."""
        return self.folder / ("bin" if self.client.kind == "pip" else "node_modules/.bin")

    def command(self, script: Path) -> list[str]:
        """Return the command that runs a script in the environment.

        Scripts may have the name of the package that they use (`-P` keeps their own folder out of the path). Those in
        Python that drive a program of an npm environment run in this interpreter. Node.js looks for packages beside the
        script alone, so JavaScript is copied into the environment.
        """
        if script.suffix == ".mjs":
            for file in (script, HERE / "helpers" / "client_checks.mjs"):
                shutil.copy(file, self.folder)
            return [str(self.programs / "node"), str(self.folder / script.name)]
        python = str(self.programs / "python") if self.client.kind == "pip" else sys.executable
        return [python, "-P", str(script)]

    def is_made(self) -> bool:
        """Return whether all that belongs to it has been installed, and the rest uninstalled."""
        stamp = self.folder / _STAMP
        return stamp.exists() and json.loads(stamp.read_text()) == self.client.recipe


def ensure_environment(client: Client, root: Path) -> Environment:
    """Return a client's environment below `root`, made anew where its requirements have changed.

    Raise InstallError with the end of what the installer said.
    """
    digest = hashlib.sha256("\n".join(client.recipe).encode()).hexdigest()[:8]
    environment = Environment(client, root / f"{client.name}-{digest}")
    if environment.is_made():
        return environment
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.mkdir(parents=True)
    if client.kind == "pip":
        _run([sys.executable, "-m", "venv", str(environment.folder)])
        pip = [str(environment.programs / "python"), "-m", "pip"]
        install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, *client.requirements])
        if client.no_deps:
            _run([*install, "--no-deps", *client.no_deps])
        if client.without:
            _run([*pip, "uninstall", "--quiet", "--yes", *client.without])
    else:
        (environment.folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(environment.folder)]
        _run([*npm, "--save-exact", *client.requirements])
    (environment.folder / _STAMP).write_text(json.dumps(client.recipe))
    return environment


def _run(command: list[str]) -> None:
    done = subprocess.run(["nice", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise InstallError(f"{' '.join(command)}\n{done.stdout[-3000:]}")
