"""The house rules: allowed imports, one name for each module, thin frontends, no pickle, pages that are up to date."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {
    name: ROOT.joinpath(*name.split(".")[1:]) for name in PROJECT["tool"]["setuptools"]["packages"]
}  # dotted name → folder
MODULES = {
    f"{package}.{path.stem}".removesuffix(".__init__"): path
    for package, folder in PACKAGES.items()
    for path in sorted(folder.glob("*.py"))
}  # dotted name → file

ROOMS = {  # room → rooms it may import, besides itself
    "": set(),
    "ipc": set(),
    "kernels": set(),
    "core": {"ipc", "kernels"},
    "compat": {"ipc"},
    "engine": {"ipc", "demo", "compat"},
    "media": {"ipc"},
    "serve": {"ipc", "engine"},
    "tools": {"ipc", "engine", "kernels", "core"},
    "web": {"ipc", "engine", "serve"},
    "cli": {"ipc", "engine", "serve", "tools", "web", "demo"},
    "demo": set(),
}
MODULE_ROOMS = {  # package → rooms it may import, if these differ from its room's; no other module may import it
    "mainspring.compat.vllm": {"ipc", "engine"},
}
PLANNER = (  # modules and packages of core that plan and must not import torch, the worker or the model
    "core.plan",
    "core.memory",
    "core.features",
    "core.loop",
    "core.lifecycle",
    "core.calls",
    "core.methods",
    "core.waits",
)
NOT_FOR_THE_PLANNER = ("torch", "mainspring.core.worker", "mainspring.core.model", "mainspring.core.parallel")
WORKER_OF_THE_PLANNER = ("mainspring.core.loop", "_local_worker")  # the one function that may import a worker
TORCH_ROOMS = {"core", "kernels", "tools"}
TRANSFORMERS_ROOMS = {"core", "media"}
NO_PICKLE_ROOMS = {"", "ipc", "core", "engine", "media", "compat", "serve", "web", "cli"}
PICKLES = {"mainspring.core.worker.rank_link"}  # for processes that one core consists of
NOT_FROM_THE_WIRE = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}
RUNS_DATA = {"eval", "exec", "compile", "__import__"}  # builtins
UNPICKLES = {"recv_pyobj", "send_pyobj", "recv_serialized"}  # of pyzmq's sockets
CONSOLE = {"mainspring.cli.main", "mainspring.cli.console", "mainspring.compat.vllm.helpers"}  # modules that print
BEHIND_ENGINES = {"core", "media"}  # rooms that an engine imports if they run in its process
PUBLIC_NAMES = ["LLM", "LLMEngine", "AsyncLLMEngine", "SamplingParams", "EngineArgs"]


class Import(NamedTuple):
    importer: str
    imported: str  # absolute dotted name
    function: str | None  # the enclosing function
    typing_only: bool

    @property
    def top(self) -> str:
        return self.imported.split(".")[0]


def room_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def imports_of(module: str) -> Iterator[Import]:
    """All import statements in a module, at any depth."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, function: str | None, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, function, typing_only)
            elif isinstance(child, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) + 1 - child.level] if child.level else []
                origin = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    named = f"{origin}.{alias.name}"
                    inside = named in MODULES or origin == "mainspring"
                    yield Import(module, named if inside else origin, function, typing_only)
            else:
                within = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
                guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, within, typing_only or guarded)

    yield from walk(ast.parse(path.read_text(), str(path)), None, False)


ALL_IMPORTS = [found for module in MODULES for found in imports_of(module)]


def allowed_rooms(module: str) -> set[str]:
    own = next((rooms for package, rooms in MODULE_ROOMS.items() if is_within(module, package)), None)
    return {room_of(module), *(ROOMS[room_of(module)] if own is None else own)}


def circles() -> list[list[str]]:
    """Modules of one room that import each other, directly or through others of the room: the strongly connected
    components of the graph of all import statements, by Tarjan's algorithm."""
    imports: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in ALL_IMPORTS:
        if found.imported in MODULES and room_of(found.imported) == room_of(found.importer):
            imports[found.importer].add(found.imported)
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}  # the smallest number on the stack that can be reached
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imports[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            at = stack.index(module)
            components.append(stack[at:])
            del stack[at:]

    for module in MODULES:
        if module not in number:
            visit(module)
    return components


def is_within(module: str, *packages: str) -> bool:
    """Whether a module is one of these modules or packages, or inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_ignored(path: Path) -> bool:
    """Whether tools made a path: hidden folders except CI's, and build outputs."""
    return any(
        part in {"build", "dist"} or (part.startswith(".") and part not in {".ci", ".github"})
        for part in path.relative_to(ROOT).parts
    )


@functools.cache
def files() -> list[Path]:
    """All files of the project. Those that tools made are many more, and are not looked at."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not is_ignored(Path(folder, name))]
        found += [path for name in names if not is_ignored(path := Path(folder, name))]
    return found


def is_slow(node: ast.stmt) -> bool:
    """Whether this statement of a test file puts a test, or all tests of the file, into the slow tier."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)
    return ast.unparse(node).startswith("pytestmark =") and "pytest.mark.slow" in ast.unparse(node)


def modules_of_the_fast_tier() -> set[str]:
    """Modules of the package that are imported by a test file with a test of the fast tier."""
    found = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        body = ast.parse(path.read_text()).body
        fast = [node for node in body if getattr(node, "name", "").startswith("test_") and not is_slow(node)]
        if not fast or any(is_slow(node) for node in body if isinstance(node, ast.Assign)):
            continue
        for node in (child for statement in body for child in ast.walk(statement)):
            if isinstance(node, ast.ImportFrom):
                found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_folder_with_python_is_a_listed_package() -> None:
    found = {
        path.parent
        for path in files()
        if path.suffix == ".py"
        and not {"tests", "benchmarks", "examples", "docs", "training"} & set(path.relative_to(ROOT).parts[:-1])
    }
    assert found == set(PACKAGES.values())
    assert {room_of(package) for package in PACKAGES} == set(ROOMS)


def test_the_fast_tier_touches_every_folder_of_the_package() -> None:
    """A test that is slow only with some of its parameters counts as fast."""
    touched = modules_of_the_fast_tier()
    folders = {package for package in PACKAGES if any(name.startswith(f"{package}.") for name in MODULES)}
    assert sorted(folder for folder in folders if not any(name.startswith(f"{folder}.") for name in touched)) == []


def test_rooms_import_only_what_the_table_allows() -> None:
    wrong = [
        found
        for found in ALL_IMPORTS
        if found.top == "mainspring"
        and found.imported != "mainspring.__version__"
        and room_of(found.imported) not in allowed_rooms(found.importer)
        and not (room_of(found.importer) == "engine" and room_of(found.imported) in BEHIND_ENGINES)  # a test below
        and not (found.importer == "mainspring" and (found.typing_only or found.function))  # lazy public names
    ]
    assert not wrong
    assert not [
        found
        for found in ALL_IMPORTS
        for package in MODULE_ROOMS
        if is_within(found.imported, package) and not is_within(found.importer, package)
    ]


def test_circles_of_imports_inside_a_room_have_two_files_at_most() -> None:
    wrong = [circle for circle in circles() if len(circle) > 2]
    assert not wrong


def test_no_name_stands_for_two_things_in_one_room() -> None:
    """Files, and public classes and functions on the top level of a file."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, path in MODULES.items():
        if path.stem in {"__init__", "__main__"}:
            continue
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        public = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}
        for name in (path.name, *(name for name in public if not name.startswith("_"))):
            found.setdefault((room_of(module), name), []).append(module)
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


def test_engine_imports_core_and_media_inside_few_functions_only() -> None:
    """Where an engine has its core, or its media worker, in its own process."""
    behind = [
        found
        for found in ALL_IMPORTS
        if room_of(found.importer) == "engine"
        and found.top == "mainspring"
        and room_of(found.imported) in BEHIND_ENGINES
    ]
    assert all(found.function for found in behind), behind
    to_core = {(found.importer, found.function) for found in behind if room_of(found.imported) == "core"}
    allowed = {("mainspring.engine.llm_engine", "make_client"), ("mainspring.engine.placement", "place")}
    assert to_core <= allowed, to_core
    to_media = {found.imported for found in behind if room_of(found.imported) == "media"}
    assert all(is_within(name, "mainspring.media.local") for name in to_media), to_media


def test_the_planner_imports_neither_torch_nor_the_worker_nor_the_model() -> None:
    planner = [module for module in MODULES if is_within(module, *(f"mainspring.{name}" for name in PLANNER))]
    assert {module.split(".")[2] for module in planner} == {name.split(".")[1] for name in PLANNER}
    wrong = [
        found
        for module in planner
        for found in imports_of(module)
        if is_within(found.imported, *NOT_FOR_THE_PLANNER)
        and ((found.importer, found.function) != WORKER_OF_THE_PLANNER or found.top == "torch")
    ]
    assert not wrong


def test_planner_modules_load_without_torch() -> None:
    planner = [module for module in MODULES if is_within(module, *(f"mainspring.{name}" for name in PLANNER))]
    run_python(f"""
import importlib, sys
sys.modules["torch"] = None  # importing it is an error
for name in {planner!r}:
    importlib.import_module(name)
""")


def test_only_core_and_kernels_import_torch_at_all() -> None:
    for_scripts = ("mainspring.compat.vllm.helpers", "_torch")  # scripts for vLLM get tensors and ask for the device
    assert not [
        f
        for f in ALL_IMPORTS
        if f.top == "torch" and room_of(f.importer) not in TORCH_ROOMS and (f.importer, f.function) != for_scripts
    ]


def test_transformers_is_imported_by_core_and_for_tokenizers_inside_a_function() -> None:
    wrong = [
        found
        for found in ALL_IMPORTS
        if found.top == "transformers"
        and room_of(found.importer) not in TRANSFORMERS_ROOMS
        and not (room_of(found.importer) == "engine" and (found.function or found.typing_only))
        and (found.importer, found.function) != ("mainspring.ipc.config", "hf_config")
    ]
    assert not wrong


def test_nothing_from_the_wire_is_unpickled() -> None:
    found = [f.importer for f in ALL_IMPORTS if f.top in NOT_FROM_THE_WIRE and room_of(f.importer) in NO_PICKLE_ROOMS]
    assert set(found) == PICKLES


def test_what_is_near_the_wire_runs_no_data_and_decodes_by_type() -> None:
    wrong = []
    for module, path in MODULES.items():
        if room_of(module) != "ipc":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            untyped = called.startswith("msgspec.") and called.endswith((".decode", ".Decoder"))
            typed = len(node.args) + len(node.keywords) > (1 if called.endswith(".decode") else 0)
            hooked = {"ext_hook", "dec_hook"} & {keyword.arg for keyword in node.keywords}
            if called in RUNS_DATA or called.rpartition(".")[2] in UNPICKLES or (untyped and (not typed or hooked)):
                wrong.append(f"{module}:{node.lineno} {called}")
    assert not wrong
    assert not [f for f in ALL_IMPORTS if f.top == "importlib" and room_of(f.importer) == "ipc"]


def test_imports_inside_the_package_are_relative() -> None:
    absolute = [
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "mainspring")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "mainspring" for alias in node.names))
    ]
    assert not absolute


def test_library_code_logs_and_does_not_print() -> None:
    printing = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        if module not in CONSOLE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not printing


def test_no_module_is_loaded_under_two_names() -> None:
    """Import everything, from the root as working directory, the way pytest and the core process do."""
    modules = [name for name in MODULES if not name.endswith(".__main__")]
    out = run_python(f"""
import importlib, os, sys
for name in {modules!r}:
    importlib.import_module(name)
ours = {set(map(str, MODULES.values()))!r}
for name, module in list(sys.modules.items()):
    if os.path.realpath(getattr(module, "__file__", None) or "") in ours:
        print(name)
""")
    assert sorted(out.split()) == sorted(modules)


def test_pytest_itself_loads_each_module_once() -> None:
    files: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "").resolve()
        if file in MODULES.values() and name != "__main__":
            files.setdefault(str(file), []).append(name)
    assert not {file: names for file, names in files.items() if len(names) > 1}
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_public_names_need_neither_torch_nor_transformers() -> None:
    out = run_python(f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
from mainspring import {", ".join(PUBLIC_NAMES)}
import mainspring
assert set({PUBLIC_NAMES!r}) <= set(dir(mainspring))
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "transformers"}}))
""")
    assert out.strip() == "[]"


def test_a_worker_of_the_server_does_not_import_numpy() -> None:
    assert run_python("import mainspring.web.worker, sys; print('numpy' in sys.modules)").strip() == "False"


def test_importing_the_package_loads_nothing_else_of_it() -> None:
    out = run_python("import mainspring, sys; print(*[name for name in sys.modules if name.startswith('mainspring.')])")
    assert out.split() == []


@pytest.mark.slow
def test_a_core_does_not_import_what_compiles_models_unless_somebody_asks_for_it() -> None:
    code = """
import sys
import mainspring.core.worker.make_worker
from transformers.models.llama import modeling_llama
import torch

heavy = {"torch._dynamo.convert_frame", "torch.distributed.tensor", "sympy"}
print(*sorted(heavy & set(sys.modules)), torch.distributed.is_available())
doubled = torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2))
print(doubled.tolist(), "torch._dynamo.convert_frame" in sys.modules)
"""
    assert run_python(code) == "True\n[2.0, 2.0] True\n"


@pytest.mark.slow
def test_what_compiles_models_may_be_asked_for_while_transformers_is_imported() -> None:
    """Torchvision asks for one function, in a chain of imports that begins with the losses; others may ask for more."""
    code = """
import sys
from importlib.abc import MetaPathFinder
import torch

class Importing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformers.image_utils":
            from torch._dynamo.utils import is_compile_supported
        if name == "transformers.generation":
            print("torch._dynamo.convert_frame" in sys.modules)
            from torch._dynamo.utils import counters

sys.meta_path.insert(0, Importing())
import mainspring.core.model.load.light_imports
print(torch._dynamo.eval_frame.OptimizedModule.__name__)
"""
    assert run_python(code) == "False\nOptimizedModule\n"


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import mainspring

    with pytest.raises(AttributeError, match="LLMEngin"):
        _ = mainspring.LLMEngin


def test_configuration_page_is_up_to_date() -> None:
    """`make docs` writes it from ipc/config.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "reference_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_version_is_said_once() -> None:
    import mainspring

    assert PROJECT["project"]["dynamic"] == ["version"]
    assert f"## {mainspring.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_no_file_names_the_place_of_this_clone() -> None:
    suffixes, names = {".py", ".md", ".toml", ".yml", ".yaml", ".json"}, {"Makefile", "run"}
    texts = [path for path in files() if path.suffix in suffixes or path.name in names]
    assert texts
    assert not [str(path) for path in texts if str(ROOT) in path.read_text()]


@pytest.mark.slow
def test_readme_python_prints_what_the_readme_shows() -> None:
    """Each python block that is followed by a plain one is run, and the plain one is what it prints."""
    pairs = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(pairs) == 3
    for code, shown in pairs:
        assert run_python(code).rstrip() == shown.rstrip()


def test_links_in_documents_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("image", sorted((ROOT / "docker").glob("Dockerfile.*")), ids=lambda path: path.name)
def test_an_image_is_built_from_every_room(image: Path) -> None:
    copied = re.findall(r"^COPY (\w+) \1$", image.read_text(), re.MULTILINE)
    rooms = {name.split(".")[1] for name in PACKAGES if "." in name}
    assert sorted(copied) == sorted(rooms)
