"""The order of the modules within a package: each imports only modules that stand before it, so there is no circle."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Lowest first.
ROOMS = {
    "experts": (
        "errors",
        # What gates choose, where experts are, and one layer of them.
        "signatures",
        "routing",
        "routing_files",
        "placement",
        "placement_search",
        "rebalance",
        "observer",
        "routing_tap",
        "moe_layer",
        # Rows travel to the ranks of their experts.
        "collectives",
        "exchange",
        "dispatch",
        # Which experts are in the fast tier, and which will be wanted.
        "predictors",
        "residency",
        "prefetch_planning",
        "prefix_warmth",
        "simulator",
        # The fast tier at work.
        "expert_file",
        "tiers",
        "deep_nvme",
        "slots",
        "expert_memory",
        "gates",
        "prefetcher",
        "lookahead",
        "resident_experts",
    ),
}


def imported_rooms(path: Path, package: str) -> set[str]:
    """The modules of the package that a file imports, at any depth of its code."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return {module.split(".")[1] for module in modules if module.startswith(f"{package}.")}


@pytest.mark.parametrize("package", ROOMS)
def test_modules_import_only_those_before_them(package: str) -> None:
    rooms = ROOMS[package]
    files = {path.stem: path for path in (ROOT / package).glob("*.py") if path.stem != "__init__"}
    assert sorted(files) == sorted(rooms)
    upwards = [
        (room, imported)
        for place, room in enumerate(rooms)
        for imported in imported_rooms(files[room], package) - set(rooms[:place])
    ]
    assert upwards == []
