"""Fills a virtual environment: `env.py deps GROUP...`, `env.py install`, `env.py wheel DIR`; and
`env.py cuda-headers` prints CMake's options that name the headers of the CUDA host side, `env.py
headers` those that name all headers.

Run it with the environment's own Python. pyproject.toml is the only place that names requirements;
a GROUP is `build`, `runtime` or one of its extras.

Packages are built without pip's build isolation, because a fresh build environment for every
rebuild would fetch jaxlib and throw away the compiled objects each time. What isolation would have
brought, the XLA FFI headers of one exact jaxlib, is unpacked once into build/ffi. So are those of
the CUDA host side, which are of later jaxlibs than some of the Pythons here can have.

The install is editable: `import jcoll` finds the checkout's Python files and the compiled module in
site-packages from any working directory (a plain install would be shadowed by ./jcoll, which has no
compiled module), and only a change of native code needs a new build.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NETWORK_SIGNS = (
    "NewConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "Temporary failure in name resolution",
    "No matching distribution",
    "ProxyError",
    "SSLError",
)


def requirements(group: str) -> list[str]:
    """The requirement strings of one group, as pip takes them."""
    if group == "build":
        isolated = PYPROJECT["build-system"]["requires"]
        return [*(r for r in isolated if r != ffi_jaxlib()), "cmake>=3.20", "ninja>=1.10"]
    if group == "runtime":
        return PYPROJECT["project"]["dependencies"]
    extras = PYPROJECT["project"]["optional-dependencies"]
    if group not in extras:
        sys.exit(f"env.py: no group '{group}'; there are build, runtime, {', '.join(extras)}")
    return extras[group]


def ffi_jaxlib() -> str:
    """The pinned requirement whose wheel carries the FFI headers."""
    (pin,) = (r for r in PYPROJECT["build-system"]["requires"] if r.startswith("jaxlib=="))
    return pin


def pip(*args: str, doing: str) -> None:
    """Runs pip quietly; on failure prints all it said and a way out."""
    print(f"jcoll setup: {doing}", flush=True, file=sys.stderr)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = done.stdout + done.stderr
    sys.stderr.write(said)
    if any(sign in said for sign in NETWORK_SIGNS):
        found, needed = "pip could not fetch a package", "a reachable PyPI, or a mirror of it"
        remedy = "check the network and 'pip config list' (index, proxy), then run make again"
    else:
        found, needed = "pip failed, with the output above", "a build that passes"
        remedy = "mend the first error above, then run make again; 'make clean' forgets old builds"
    sys.exit(
        f"\njcoll setup: {doing}: failed (exit {done.returncode})\n"
        f"  found:  {found}\n  needed: {needed}\n  do:     {remedy}\n"
    )


def install_dependencies(groups: list[str]) -> None:
    """Installs the requirements of all the groups, in one resolution."""
    wanted = list(dict.fromkeys(r for group in groups for r in requirements(group)))
    pip("install", "-q", *wanted, doing=f"installing {', '.join(wanted)}")


def installed_jaxlib() -> str | None:
    """The environment's own jaxlib as a pinned requirement."""
    try:
        return f"jaxlib=={importlib.metadata.version('jaxlib')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def headers_of(pin: str, any_python: tuple[str, ...] = ()) -> Path:
    """The folder with the XLA FFI headers of a pinned jaxlib, unpacked from its wheel if need be.

    any_python: pip's options to take a wheel that another Python is for.
    """
    target = ROOT / "build" / "ffi" / pin.replace("==", "-")
    include = target / "jaxlib" / "include"
    if (include / "xla" / "ffi" / "api" / "ffi.h").exists():
        return include
    shutil.rmtree(target, ignore_errors=True)  # A half that an interrupted build has left.
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fetch = ("download", "-q", "--no-deps", "--only-binary", ":all:", "-d", scratch)
        pip(*fetch, *any_python, pin, doing=f"fetching the XLA FFI headers of {pin}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            headers = [n for n in archive.namelist() if n.startswith("jaxlib/include/")]
            archive.extractall(Path(scratch) / "unpacked", headers)
        # At once, so that what is interrupted leaves no half that would be taken for all.
        try:
            (Path(scratch) / "unpacked").rename(target)
        except OSError:
            if not target.exists():  # Another build was faster.
                raise
    return include


def cuda_headers() -> list[str]:
    """CMake's options that name the headers of the CUDA host side; see cmake/JcollCudaFfi.cmake."""
    pins = PYPROJECT["tool"]["jcoll"]["cuda"]
    any_python = ("--python-version", pins["headers-python"])
    return [
        f"-D{variable}={headers_of(pins[key], any_python)}"
        for variable, key in (
            ("JCOLL_CUDA_FFI_INCLUDE_DIR", "ffi-headers"),
            ("JCOLL_CUDA_COLLECTIVES_INCLUDE_DIR", "collectives-headers"),
        )
    ]


def ffi_headers() -> list[str]:
    """What CMake is to define, unless the environment's own jaxlib has the headers."""
    if installed_jaxlib() == ffi_jaxlib():
        return []
    return [f"JCOLL_FFI_INCLUDE_DIR={headers_of(ffi_jaxlib())}"]


def build_options() -> list[str]:
    """pip's arguments for a build in this environment."""
    options = ["--no-build-isolation", "--no-deps"]
    if os.environ.get("CI"):
        options += ["-C", "cmake.define.JCOLL_WERROR=ON"]
    for definition in ffi_headers():
        options += ["-C", f"cmake.define.{definition}"]
    return options


def main(argv: list[str]) -> None:
    """Runs one subcommand."""
    match argv:
        case ["deps", *groups] if groups:
            install_dependencies(groups)
        case ["install"]:
            # Configures the native tests too, for `make native-test` to build on the same objects.
            options = [*build_options(), "-C", "cmake.define.JCOLL_TESTS=ON"]
            pip("install", *options, "-e", ".", doing="building and installing jcoll")
        case ["wheel", folder]:
            pip("wheel", *build_options(), "-w", folder, ".", doing=f"building a wheel: {folder}/")
        case ["cuda-headers"]:
            print(*cuda_headers(), sep="\n")
        case ["headers"]:
            print(*(f"-D{definition}" for definition in ffi_headers()), *cuda_headers(), sep="\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
