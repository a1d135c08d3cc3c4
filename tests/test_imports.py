"""Who may import whom, as the design has it; read from the source, so that nothing has to run."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from drafters.method import all_methods

ROOT = Path(__file__).parent.parent
FOLDERS = ("drafters", "serve", "data", "eval", "train", "recipes", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def running(node: ast.AST):
    """All nodes but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from running(child)


def imports(module: str) -> set[str]:
    """Modules that a module imports, those inside its functions included."""
    found = set()
    for node in running(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return found


def ours(module: str) -> set[str]:
    """Those of this project."""
    return {name for name in imports(module) if name.split(".")[0] in FOLDERS}


def of(folder: str) -> list[str]:
    found = [name for name in MODULES if name.split(".")[0] == folder]
    assert found, folder
    return found


# The rules --------------------------------------------------------------------------------------------


def test_no_module_imports_itself_through_others():
    state: dict[str, str] = {}

    def visit(module: str, path: list[str]) -> None:
        assert state.get(module) != "open", " -> ".join([*path[path.index(module) :], module])
        if module in state:
            return
        state[module] = "open"
        for other in sorted(ours(module) & MODULES.keys() - {module.split(".")[0]}):
            visit(other, [*path, module])
        state[module] = "done"

    for module in MODULES:
        visit(module, [])
    assert set(state) >= MODULES.keys() - set(FOLDERS)


@pytest.mark.parametrize("module", of("drafters"))
def test_drafters_imports_nothing_of_the_other_folders(module):
    assert {name for name in ours(module) if not name.startswith("drafters")} == set()


@pytest.mark.parametrize("module", of("serve"))
def test_serve_imports_only_drafters_and_the_chat_template(module):
    allowed = {"data.chat"} | ({"recipes.cli"} if module == "serve.__main__" else set())
    assert {name for name in ours(module) if name.split(".")[0] not in ("drafters", "serve")} <= allowed


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] != "train"])
def test_nothing_imports_train(module):
    """But for the tree of settings, made of each owner's dataclass, and the benchmark of a training step."""
    found = {name for name in ours(module) if name.split(".")[0] == "train"}
    allowed = {
        "recipes.schema": {"train.log", "train.loop", "train.optim"},
        "benchmarks.step": {"train.engine", "train.optim"},
    }
    assert found <= allowed.get(module, set())


@pytest.mark.parametrize("module", [*of("data"), *of("eval")])
def test_data_and_eval_know_no_settings_but_their_own(module):
    """What composes the tree, ``__main__``, may import ``recipes``; eval is above data, not below."""
    allowed = {"recipes.cli"} if module.endswith("__main__") else set()
    assert {name for name in ours(module) if name.split(".")[0] == "recipes"} <= allowed
    if module.startswith("data"):
        assert not any(name.startswith("eval") for name in ours(module))


@pytest.mark.parametrize(("package", "owner"), [("wandb", "train.log"), ("deepspeed", "train.engine")])
def test_a_heavy_package_is_imported_in_one_place(package, owner):
    users = {module for module in MODULES if package in {name.split(".")[0] for name in imports(module)}}
    assert users == {owner}


@pytest.mark.parametrize("module", ["train.loop", "serve.engine"])
def test_the_loop_and_the_engine_name_no_method(module):
    text = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8").lower()
    names = {*all_methods(), "dflash", "eagle", "dspark", "mtp"}
    assert {name for name in names if re.search(rf"(?<![a-z]){name}", text)} == set()


def test_every_method_has_a_file_and_a_recipe_of_its_name():
    for name in all_methods():
        assert (ROOT / "drafters" / f"{name}.py").exists()
        assert (ROOT / "recipes" / "recipe" / f"{name}.yaml").exists()


# Style ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [name for name in MODULES if name not in FOLDERS])
def test_public_functions_and_classes_say_what_they_are_for(module):
    tree = MODULES[module]
    assert ast.get_docstring(tree), module
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    silent = [node.name for node in public if node.name != "main" and not ast.get_docstring(node)]
    assert silent == []


@pytest.mark.parametrize("module", list(MODULES))
def test_every_module_can_be_imported(module):
    importlib.import_module(module)
