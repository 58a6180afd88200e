"""The order of rooms in the big packages and the frontend, and how objects are wired: through constructors."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.contracts.rooms import CLOSED_TO_TESTS, ROOMS
from tests.support.sources import FILES as ALL_FILES
from tests.support.sources import ROOT, nodes_of

FILES = [path for path in ALL_FILES if path.name != "__init__.py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Of objects that other libraries define.
FOREIGN_ATTRIBUTES = {
    "_attn_implementation_internal",
    "argtypes",
    "argv",
    "collected_tensors",
    "curve_publickey",
    "curve_secretkey",
    "curve_server",
    "curve_serverkey",
    "decoder",
    "environ",
    "forward",
    "jit_cache_hook",
    "keywords",
    "normalizer",
    "post_processor",
    "pre_tokenizer",
    "redirect_slashes",
    "restype",
    "zap_domain",
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def imports_of(module: str) -> frozenset[str]:
    """The product's modules that a module imports, at any depth of its code."""
    found = set()
    for node in nodes_of(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module)
    return frozenset(found & MODULES.keys() - {module})


def test_no_module_imports_itself_through_others():
    waiting = dict.fromkeys(MODULES, frozenset())
    waiting.update({module: imports_of(module) for module in MODULES})
    while free := {module for module, imported in waiting.items() if not imported & waiting.keys()}:
        waiting = {module: imported for module, imported in waiting.items() if module not in free}
    assert sorted(waiting) == []


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_rooms_below_them(package):
    place = {room.rstrip("*"): number for number, room in enumerate(ROOMS[package])}
    rooms = {module: module.removeprefix(f"{package}.").split(".")[0] for module in MODULES if is_in(module, package)}
    assert place.keys() == set(rooms.values()), f"ROOMS[{package!r}] has other rooms than the package"
    upwards = []
    for module, room in rooms.items():
        for imported in imports_of(module) & rooms.keys():
            if place[rooms[imported]] > place[room]:
                upwards.append(f"{module} imports {imported}")
    assert upwards == []


def is_in(module: str, package: str) -> bool:
    return module.startswith(f"{package}.")


def record_fields() -> set[str]:
    """Return the names of fields: annotated in a record's body, or in the `__slots__` of a class without behaviour."""
    names: set[str] = set()
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and is_record(node):
                names |= {
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
                }
                names |= slots_of(node)
    return names


def is_record(node: ast.ClassDef) -> bool:
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
    if "dataclass" in decorators or any("Struct" in ast.unparse(base) for base in node.bases):
        return True
    methods = {statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)}
    return methods <= {"__init__", "__lt__", "__repr__"} or all(
        is_property(statement) for statement in node.body if isinstance(statement, ast.FunctionDef)
    )


def is_property(function: ast.FunctionDef) -> bool:
    return function.name == "__init__" or any(ast.unparse(d) == "property" for d in function.decorator_list)


def slots_of(node: ast.ClassDef) -> set[str]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            return {ast.literal_eval(element) for element in getattr(statement.value, "elts", [])}
    return set()


def assigned_attributes(path: Path) -> Iterator[tuple[int, str]]:
    """(line, attribute) of every assignment to an attribute of something other than `self`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) not in ("self", "cls"):
                    yield part.lineno, part.attr


def test_nothing_is_set_on_another_object_but_the_fields_of_a_record():
    allowed = record_fields() | FOREIGN_ATTRIBUTES
    found = [
        f"{path.relative_to(ROOT)}:{line} sets {name}"
        for path in FILES
        for line, name in assigned_attributes(path)
        if name not in allowed
    ]
    assert found == []


def private_attributes(path: Path) -> Iterator[ast.Attribute]:
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node


def is_own(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls")


@pytest.mark.parametrize("package", CLOSED_TO_TESTS)
def test_tests_name_no_private_attribute(package):
    paths = [path for module, path in MODULES.items() if is_in(module, package)]
    private = {node.attr for path in paths for node in private_attributes(path)}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} names {node.attr}"
        for path in TESTS
        if any(f"{module}.".startswith(f"{package}.") for module in modules_named_in(path))
        for node in private_attributes(path)
        if node.attr in private and not is_own(node)
    ]
    assert found == []


def modules_named_in(path: Path) -> Iterator[str]:
    return (node.module or "" for node in nodes_of(path) if isinstance(node, ast.ImportFrom))
