"""The structure of the project as tests: import direction, size budgets, documented names.

All but the last test read the sources; nothing is imported. `A <- B` below: B may import A.
"""

import ast
import functools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("jcoll", "csrc", "cuda", "tests", "examples", "scripts")
CODE_SUFFIXES = (".py", ".cc", ".h", ".def", ".cu", ".cuh")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_FUNCTION_LINES = 10
MAX_COLUMNS = 100

# A part may import the parts of earlier rows and itself, not its neighbours in the row.
ORDER = (
    ("sizes", "cores", "shared_heap"),
    ("config", "errors", "_compat", "_native", "_cuda"),
    ("plan",),
    ("algorithms",),
    ("comm",),
    ("tuning",),
    ("runtime",),
    ("ops",),
    ("layers", "explain", "intercept"),
    ("",),  # jcoll/__init__.py itself: what `import jcoll` brings
    ("bench", "launch"),
    ("cli_plan", "cli_doctor"),
    ("cli_tune",),
    ("cli",),
    ("__main__",),
)  # fmt: skip
LEVEL = {part: level for level, row in enumerate(ORDER) for part in row}
BUILT = ("_native", "_cuda")  # No files in the sources but stubs.

# These run, and are tested, in milliseconds.
JAX_FREE = ("plan", "algorithms", "comm", "tuning")
KNOWS_JAX = ("comm.mesh",)


def code_files(*suffixes: str) -> list[Path]:
    """Every source file of ours with one of the suffixes."""
    found = [
        path
        for folder in CODE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (suffixes or CODE_SUFFIXES)
    ]
    assert found
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name below jcoll ("ops.all_reduce"; "" is the package itself) -> file."""
    package = ROOT / "jcoll"
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported_names(name: str) -> Iterator[str]:
    """Absolute dotted names that a module of jcoll imports, at the top or inside functions."""
    path = modules()[name]
    package = ["jcoll", *filter(None, name.split("."))]
    if path.stem != "__init__":
        package.pop()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within_jcoll(imported: str) -> str | None:
    """The module of ours behind an absolute name: "jcoll.plan.ir.Step" -> "plan.ir"; else None."""
    head, _, name = imported.partition(".")
    if head != "jcoll":
        return None
    while name and name not in modules() and name not in BUILT:
        name = name.rpartition(".")[0]
    return name


def imports_of_ours(name: str) -> set[str]:
    found = {within_jcoll(imported) for imported in imported_names(name)}
    return {module for module in found if module is not None}


def part_of(name: str) -> str:
    return name.split(".")[0]


def functions(path: Path) -> list[tuple[int, int]]:
    """(first line, number of lines) of each Python function, or each C++ function at file scope."""
    if path.suffix == ".py":
        return [
            (node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    return list(native_functions(path.read_text().splitlines()))


def native_functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Leans on clang-format: a function starts and ends in column 0, its body is indented."""
    start, inside = 0, False
    for number, line in enumerate(lines, 1):
        if not inside and re.match(r"(namespace|struct|class|enum|union|extern)\b", line):
            start = 0  # Of a template, too.
        elif not inside and re.match(r"\w", line):
            start = start or number
        if inside and line.startswith("}"):
            yield start, number - start + 1
            start, inside = 0, False
        elif start and not inside:
            inside = line.endswith("{") and not line.endswith("= {")
            if not inside and (not line or line.endswith((";", "}", "= {"))):
                start = 0


def test_every_part_has_a_place_in_the_order():
    parts = {part_of(name) for name in modules()}
    assert "ops" in parts
    assert parts <= set(LEVEL), f"add to ORDER: {sorted(parts - set(LEVEL))}"
    gone = set(LEVEL) - parts - set(BUILT)
    assert not gone, f"take out of ORDER: {sorted(gone)}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_left(name):
    part = part_of(name)
    wrong = sorted(
        other
        for other in imports_of_ours(name)
        if part_of(other) != part and LEVEL[part_of(other)] >= LEVEL[part]
    )
    assert not wrong, f"jcoll.{name} may not import {wrong}"


def test_parts_without_jax():
    def imports_jax(name: str) -> bool:
        return any(part_of(imported) in ("jax", "jaxlib") for imported in imported_names(name))

    for name in modules():
        if not any(name == free or name.startswith(free + ".") for free in JAX_FREE):
            continue
        if name in KNOWS_JAX:
            continue
        reached = reachable(name)
        wrong = sorted(module for module in reached if imports_jax(module))
        assert not wrong, f"jcoll.{name} may not import jax, but does through {wrong}"


def reachable(name: str) -> set[str]:
    """The module and all modules of ours that its import lines lead to."""
    seen, todo = set(), [name]
    while todo:
        module = todo.pop()
        if module not in seen and module in modules():
            seen.add(module)
            todo.extend(imports_of_ours(module))
    return seen


@pytest.mark.parametrize("name", sorted(modules()))
def test_only_compat_knows_jax_internals(name):
    uses = [imported for imported in imported_names(name) if imported.startswith("jax._src")]
    uses += [
        ast.unparse(node)
        for node in ast.walk(parsed(modules()[name]))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax._src")
    ]
    assert name == "_compat" or not uses, f"move to jcoll/_compat.py: {uses}"


@pytest.mark.parametrize("path", code_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_size_budgets(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_FILE_LINES
    wide = [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
    assert not wide, f"wider than {MAX_COLUMNS} columns: lines {wide}"
    long = [(start, size) for start, size in functions(path) if size > MAX_FUNCTION_LINES]
    assert not long, f"functions (line, length) over {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("suffix", [".py", ".cc"])
def test_functions_are_short(suffix, record_property):
    paths = [p for p in code_files(suffix) if p.relative_to(ROOT).parts[0] in ("jcoll", "csrc")]
    sizes = [size for path in paths for _, size in functions(path)]
    assert len(sizes) > 20
    record_property("median_function_lines", statistics.median(sizes))
    assert statistics.median(sizes) <= MAX_MEDIAN_FUNCTION_LINES


def test_environment_variables_are_fields_of_the_config():
    in_python = {
        (node.value, path.relative_to(ROOT))
        for path in modules().values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"JCOLL_[A-Z0-9_]+", node.value)
    }
    in_native = {
        (variable, path.relative_to(ROOT))
        for path in code_files(".cc", ".h", ".cu", ".cuh")
        for variable in re.findall(r'"(JCOLL_[A-Z0-9_]+)"', path.read_text())
    }
    documented = set(re.findall(r"\bJCOLL_[A-Z0-9_]+\b", (ROOT / "jcoll/config.py").read_text()))
    assert documented
    unknown = sorted(f"{v} in {p}" for v, p in in_python | in_native if v not in documented)
    assert not unknown, f"give each a documented field in jcoll/config.py: {unknown}"


def test_public_names_have_docstrings():
    import jcoll

    public = {name: value for name, value in vars(jcoll).items() if not name.startswith("_")}
    called = {name: value for name, value in public.items() if callable(value)}
    assert {"all_reduce", "sync_gradients", "metrics"} <= set(called)
    bare = sorted(name for name, value in called.items() if not value.__doc__)
    assert not bare
    from jcoll.ops import SPECS

    ops = {name: getattr(jcoll, name).__doc__ for name in SPECS if hasattr(jcoll, name)}
    assert not sorted(name for name, text in ops.items() if "Derivative: " not in text)
