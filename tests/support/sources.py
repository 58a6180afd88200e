"""The product's files as syntax trees, for the contracts: each is parsed once in a process."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launcher", "moeserve", "radix_cache", "experts", "kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))
