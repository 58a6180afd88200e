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
# The only place in which a module is entered: modules, and folders with all they hold (`.*`), that compute with torch
# or put together what does. All others decide, and load where torch is not installed.
WITH_TORCH = {
    "kernels.*",
    "experts.moe_layer",
    "experts.memory.mapped",
    "experts.memory.memory",
    "experts.memory.resident_experts",
    "experts.memory.slots",
    "experts.memory.tiers",
    "experts.parallel.collectives",
    "experts.parallel.dispatch",
    "experts.parallel.exchange",
    "experts.parallel.tables",
    "experts.prediction.lookahead",
    "experts.prediction.prefetcher",
    "experts.routing.gates",
    "experts.routing.tap",
    "moeserve.bench.decode",
    "moeserve.bench.quality",
    "moeserve.engine.assemble",
    "moeserve.engine.cpu_body",
    "moeserve.engine.doctor",
    "moeserve.engine.gguf_choice",
    "moeserve.engine.gpu_body",
    "moeserve.engine.gpu_check.check",
    "moeserve.engine.gpu_check.kernels",
    "moeserve.engine.gpu_check.models",
    "moeserve.engine.kv_host",
    "moeserve.engine.memory_plan",
    "moeserve.engine.ranked_service",
    "moeserve.engine.service",
    "moeserve.engine.experts.fit",
    "moeserve.engine.experts.gpu_memory",
    "moeserve.engine.experts.kept",
    "moeserve.engine.experts.memory",
    "moeserve.engine.experts.prefetch",
    "moeserve.engine.experts.resident_model",
    "moeserve.engine.ranks.joint",
    "moeserve.engine.ranks.partners",
    "moeserve.engine.ranks.pipe",
    "moeserve.engine.ranks.pipeline",
    "moeserve.engine.ranks.steps",
    "moeserve.engine.ranks.transport",
    "moeserve.model.decoder",
    "moeserve.model.delta_net",
    "moeserve.model.demo_build",
    "moeserve.model.expert_store",
    "moeserve.model.expert_weights",
    "moeserve.model.kv_pool",
    "moeserve.model.mtp_drafts",
    "moeserve.model.norms_over_ranks",
    "moeserve.model.paged_batch",
    "moeserve.model.rounding",
    "moeserve.model.runner",
    "moeserve.model.sampler",
    "moeserve.model.split_demo",
    "moeserve.model.state_pool",
    "moeserve.model.tensor_reader",
    "moeserve.model.weights",
    "moeserve.model.gguf.tensors",
    "moeserve.model.packed.tensors",
    "moeserve.model.gpu.*",
    "moeserve.model.hf.*",
}
# The modules of these folders that others import to decide.
WITHOUT_TORCH = {
    "kernels.cpu.build",
    "kernels.cpu.library",
    "kernels.cpu.targets",
    "kernels.gpu.moe_config",
    "kernels.specs",
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


def computes(module: str) -> bool:
    """Return whether a module may load torch."""
    parts = module.split(".")
    folders = {".".join(parts[:depth]) + ".*" for depth in range(1, len(parts))}
    return module not in WITHOUT_TORCH and (module in WITH_TORCH or bool(folders & WITH_TORCH))


def test_all_modules_but_those_that_compute_load_without_torch():
    modules = {module_of(path) for path in FILES if path.name != "__init__.py"} | {*PACKAGES}
    named = {name.removesuffix(".*") for name in WITH_TORCH | WITHOUT_TORCH}
    assert {name for name in named if not (ROOT / name.replace(".", "/")).is_dir()} <= modules
    # The HTTP process is among them, which loads no transformers either.
    deciding = sorted(module for module in modules if not computes(module) and module != "kernels")
    assert loaded_after(deciding, {"torch", "transformers"}) == ""
