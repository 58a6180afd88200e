"""Who may import whom, read from the syntax trees, and what may not appear in any file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.contracts.rooms import ROOMS
from tests.support.sources import FILES, PACKAGES, ROOT, nodes_of

# Not in the wheel: they import the packages, no package imports them.
OUTSIDE = ("benchmarks", "tests")
MAY_IMPORT = {
    "launcher": {"moeserve"},
    "moeserve": {"radix_cache", "experts", "kernels"},
    "experts": {"kernels"},
    "radix_cache": set(),
    "kernels": set(),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module a file imports, at any depth of its code."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module or ""


def imported_packages(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(path)}


def test_imports_go_down_only():
    upwards = {}
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        others = imported_packages(path) & {*PACKAGES, *OUTSIDE} - {package}
        # The package's public name, `LLM`, is made by the topmost floor when it is asked for.
        public = {"launcher"} if name_of(path) == "moeserve/__init__.py" else set()
        upwards[name_of(path)] = others - MAY_IMPORT[package] - public
    assert {path: others for path, others in upwards.items() if others} == {}


def test_the_radix_cache_needs_the_standard_library_alone():
    roots = set().union(*(imported_packages(path) for path in (ROOT / "radix_cache").rglob("*.py")))
    assert roots <= set(sys.stdlib_module_names) | {"radix_cache"}


def test_no_package_imports_torch_by_itself():
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert packages
    heavy = {"torch", "transformers", "triton"}
    assert {name_of(path): found for path in packages if (found := heavy & imported_packages(path))} == {}


def test_kernels_imports_nothing_by_itself():
    # transformers looks for a package of this name.
    assert not list(imported_modules(ROOT / "kernels" / "__init__.py"))


def test_nothing_unpickles_and_no_foreign_code_runs():
    found = {}
    for path in FILES:
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        found[name_of(path)] = {
            *({"pickle", "dill", "cloudpickle", "marshal", "shelve"} & set(imported_modules(path))),
            *({"torch.load", "eval", "exec", "pickle.loads"} & {ast.unparse(call.func) for call in calls}),
            *({"trust_remote_code"} & {keyword.arg for call in calls for keyword in call.keywords}),
        }
    assert {path: names for path, names in found.items() if names} == {}


def loaded_after(modules: list[str], forbidden: set[str]) -> str:
    """Imports each module in one fresh interpreter and returns the first that brought a forbidden one with it."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = {sorted(forbidden)!r}\n"
        "    found = [other for other in found if other in sys.modules]\n"
        "    if found:\n"
        "        print(name, found)\n"
        "        break\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def may_load_torch(module: str) -> bool:
    """Return whether a module is of a room that computes. Of `kernels` all may."""
    package, *inner = module.split(".")
    return package == "kernels" or (bool(inner) and f"{inner[0]}*" in ROOMS.get(package, ()))


def test_rooms_that_decide_load_without_torch():
    modules = {module_of(path) for path in FILES if path.name != "__init__.py"} | {*PACKAGES}
    # The HTTP process is among them, which loads no transformers either.
    deciding = sorted(module for module in modules if not may_load_torch(module))
    assert deciding
    assert loaded_after(deciding, {"torch", "transformers"}) == ""
