"""What the build has made: the compiled module, its type stub, the version and the command."""

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import jcoll
from jcoll import _native

ROOT = Path(__file__).resolve().parent.parent


def test_version_is_the_one_in_pyproject():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert jcoll.__version__ == declared == importlib.metadata.version("jcoll")


def test_stub_names_what_the_native_module_has():
    stub = ast.parse((ROOT / "jcoll/_native.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert declared == {name for name in dir(_native) if not name.startswith("__")}


def test_native_module_needs_no_library_but_the_system_ones():
    assert _native.__file__ is not None
    assert Path(_native.__file__).suffix == ".so"
    needed = subprocess.run(
        ["ldd", _native.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "not found" not in needed
    assert "jaxlib" not in needed


def test_console_script_and_module_are_the_same_command():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="jcoll")
    assert script.value == "jcoll.cli:main"
    done = subprocess.run(
        [sys.executable, "-m", "jcoll", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout


def test_import_starts_no_backend_and_no_thread():
    code = """
import threading, jcoll
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert threading.active_count() == 1
assert jcoll._native.num_workers_alive() == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
