"""Who may import whom, read from the syntax trees, and what may not appear in any file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
SERVICE_FOLDERS = tuple(
    ROOT / "moeserve" / folder
    for folder in (
        ".",
        "grammars",
        "scheduling",
        "engine",
        "engine/crashes",
        "engine/experts",
        "engine/kv_disk",
        "engine/kv_events",
        "engine/ranks",
    )
)

# Of experts/ and the modules in these folders, those that compute, or put together what does. All others decide, and
# load where torch is not installed.
WITH_TORCH = {
    "experts.parallel.collectives",
    "experts.parallel.exchange",
    "experts.parallel.dispatch",
    "experts.moe_layer",
    "experts.memory.deep_nvme",
    "experts.memory.slots",
    "experts.memory.memory",
    "experts.memory.tiers",
    "experts.memory.resident_experts",
    "moeserve.engine.experts.deepnvme",
    "moeserve.engine.experts.fit",
    "experts.prediction.lookahead",
    "experts.routing.gates",
    "experts.prediction.prefetcher",
    "experts.routing.tap",
    "moeserve.engine.experts.gpu_memory",
    "moeserve.engine.experts.memory",
    "moeserve.engine.experts.prefetch",
    "moeserve.engine.experts.resident_model",
    "moeserve.engine.assemble",
    "moeserve.engine.gpu_body",
    "moeserve.engine.memory_plan",
    "moeserve.engine.doctor",
    "moeserve.engine.service",
    "moeserve.engine.ranked_service",
    "moeserve.engine.ranks.transport",
    "moeserve.engine.ranks.steps",
}
# What else loads without torch.
PURE = [
    "kernels.gpu.moe_config",
    "kernels.specs",
    "launcher.cli",
    "launcher.serve",
    "launcher.doctor",
    "launcher.chat",
    "launcher.run_batch",
    "launcher.offline",
    "launcher.top",
    "launcher.supervisor",
    "launcher.worker",
    "moeserve.bench.serve",
    "moeserve.device",
    "moeserve.machine",
    "moeserve.model.step_arrays",
    "moeserve.model.spec",
    "moeserve.model.rope",
    "moeserve.model.families",
    "moeserve.model.checkpoint",
    "moeserve.model.sizes",
    "moeserve.model.cache",
    "moeserve.model.source",
    "radix_cache",
]


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
        # The package's public name, `TokenEngine`, is made by the topmost floor when it is asked for.
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


def test_pure_modules_load_without_torch():
    decisions = {module_of(path) for path in FILES if path.is_relative_to(ROOT / "experts")} | {
        module_of(path) for folder in SERVICE_FOLDERS for path in folder.glob("*.py")
    }
    assert decisions >= WITH_TORCH
    assert loaded_after([*sorted(decisions - WITH_TORCH), *PURE], {"torch", "transformers"}) == ""


def test_the_http_process_loads_neither_torch_nor_transformers():
    frontend = [
        module_of(path)
        for path in FILES
        if path.is_relative_to(ROOT / "moeserve" / "frontend") and path.name != "__init__.py"
    ]
    assert loaded_after([*frontend, "launcher.frontend_main"], {"torch", "transformers"}) == ""
