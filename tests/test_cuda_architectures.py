"""Which nvcc CMake finds, if any, and for which GPUs it has the kernels compiled. Both with an nvcc
that is made up.

CMake runs a script here, where it can: a project takes longer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).resolve().parent.parent / "cmake" / "JcollCudaCompiler.cmake"
CMAKE = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))

COMPILERS = ("CUDACXX", "CUDA_HOME")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake")


def choose(tmp_path: Path, archs: str, are_asked_for: bool) -> tuple[int, str]:
    """With an nvcc that knows sm_75 to sm_100. Exit status and what CMake says, as one line."""
    nvcc = program(tmp_path / "nvcc", "printf 'sm_75\\nsm_80\\nsm_90\\nsm_100\\n'")
    return cmake(
        tmp_path,
        "OFF",
        f"include({MODULE})\nset(CMAKE_CUDA_COMPILER {nvcc})\n"
        f'jcoll_choose_archs("{archs}" {str(are_asked_for).upper()} chosen)\n'
        'message(STATUS "chosen: ${chosen}.")\n',
    )


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def cmake(tmp_path: Path, jcoll_cuda: str, text: str, **env: object) -> tuple[int, str]:
    script = tmp_path / "script.cmake"
    script.write_text(f"cmake_minimum_required(VERSION 3.20)\n{text}")  # As the project does.
    return run([CMAKE, f"-DJCOLL_CUDA={jcoll_cuda}", "-P", script], **env)


def run(command: list, **env: object) -> tuple[int, str]:
    """Exit status and what is said, as one line. env: besides this process's own, or against it."""
    here = {name: value for name, value in os.environ.items() if name not in COMPILERS}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env=here | {name: str(value) for name, value in env.items()},
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "here"])
def test_what_nvcc_knows(tmp_path, asked: bool):
    status, text = choose(tmp_path, "80-real;90a-real;100;100f-virtual", asked)
    assert (status, "Warning" in text) == (0, False)
    assert "chosen: 80-real;90a-real;100;100f-virtual." in text


@pytest.mark.parametrize("arch", ["75", "103-real", "80-reel", "all", "80,90", "sm_80", "-1"])
def test_what_was_asked_for_and_cannot_be_done(tmp_path, arch: str):
    status, text = choose(tmp_path, f"80-real;{arch}", True)
    assert status != 0
    assert f"JCOLL_CUDA_ARCH has '{arch}'. This nvcc and jcoll can do 80, 90, 100." in text


@pytest.mark.parametrize("sm", ["75", "103"], ids=["too old", "newer than nvcc"])
def test_a_gpu_that_is_here_does_not_stop_the_build(tmp_path, sm: str):
    """`pip install` on a machine with such a GPU: nobody asked for kernels."""
    status, text = choose(tmp_path, f"{sm}-real;80-real", False)
    assert (status, "chosen: 80-real." in text) == (0, True)
    assert f"no kernels for the GPU of sm_{sm} that is here" in text
    assert "can do 80, 90, 100." in text
    assert "chosen: ." in choose(tmp_path, f"{sm}-real", False)[1]


@pytest.mark.parametrize("value", ["OFF", "off", "0", "", "FALSE", "no", "auto", "AUTO"])
def test_what_builds_no_kernels_here(tmp_path, value: str):
    """AUTO in any letters: not for the tests, which need no extension."""
    text = f'include({MODULE})\nmessage("kernels: ${{jcoll_build_cuda}}")'
    assert cmake(tmp_path, value, text) == (0, "kernels: OFF")


@pytest.mark.parametrize("value", ["maybe", "cuda13", "ONN"])
def test_a_choice_that_is_none(tmp_path, value: str):
    status, text = cmake(tmp_path, value, f"include({MODULE})")
    assert status != 0
    assert f"(JCOLL_BUILD_CUDA for pip) is '{value}'. Set it to AUTO, ON or OFF" in text


# Which nvcc


def test_without_nvcc_the_build_goes_on(tmp_path):
    """`pip install` where there is a GPU: a warning says what to do."""
    program(tmp_path / "bin" / "nvidia-smi", "echo 9.0")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(without LANGUAGES NONE)\n"
        f"set(JCOLL_PYTHON ON)\ninclude({MODULE})\n"
        'message(STATUS "kernels: ${jcoll_build_cuda}, and on it goes")\n'
    )
    status, text = run(
        [CMAKE, "-S", tmp_path, "-B", tmp_path / "build", *generator()],
        PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
        CUDACXX=tmp_path / "no-nvcc",  # CMake would find one that is in the usual places.
    )
    assert (status, "kernels: OFF, and on it goes" in text) == (0, True), text
    needed = "no nvcc, so no kernels for CUDA. Have it on PATH, or set CUDA_HOME or CUDACXX"
    assert f"jcoll: {needed}" in text


def generator() -> list[str]:
    """That of the build, also where it is not on PATH."""
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []


@pytest.fixture
def wheels(tmp_path) -> dict[str, Path]:
    """An nvcc where `pip install nvidia-cuda-nvcc` puts it, and a Python that has it."""
    site = tmp_path / "site-packages"
    nvcc = program(site / "nvidia" / "cu13" / "bin" / "nvcc", "echo sm_90")
    return {"nvcc": nvcc, "python": program(tmp_path / "python", f"echo {site}")}


def found(tmp_path: Path, python: Path, **env: object) -> str:
    """What jcoll_find_nvcc finds, with nothing on PATH if that is not in `env`."""
    status, text = cmake(
        tmp_path,
        "OFF",
        f"include({MODULE})\nset(Python_EXECUTABLE {python})\njcoll_find_nvcc(nvcc)\n"
        'message("found: ${nvcc}")\n',
        **{"PATH": tmp_path / "empty", **env},
    )
    assert status == 0, text
    return text.removeprefix("found: ")


def test_nvcc_of_wheels(tmp_path, wheels):
    assert found(tmp_path, wheels["python"]) == str(wheels["nvcc"])


@pytest.mark.parametrize(("variable", "folder"), [("CUDA_HOME", "cuda"), ("PATH", "cuda/bin")])
def test_an_nvcc_that_is_named_comes_before_that_of_wheels(tmp_path, wheels, variable, folder):
    nvcc = program(tmp_path / "cuda" / "bin" / "nvcc", "echo sm_90")
    assert found(tmp_path, wheels["python"], **{variable: tmp_path / folder}) == str(nvcc)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_real_nvcc_laid_out_as_wheels_do(tmp_path, wheels):
    wheels["nvcc"].unlink()
    wheels["nvcc"].symlink_to(str(shutil.which("nvcc")))
    status, text = cmake(
        tmp_path,
        "OFF",
        f"include({MODULE})\nset(Python_EXECUTABLE {wheels['python']})\n"
        "set(ENV{PATH} /nowhere)\njcoll_find_nvcc(CMAKE_CUDA_COMPILER)\n"
        f"set(ENV{{PATH}} {os.environ['PATH']})\n"
        'jcoll_choose_archs("90a-real;80" TRUE chosen)\n'
        'message("${CMAKE_CUDA_COMPILER}: ${chosen}.")\n',
    )
    assert (status, text) == (0, f"{wheels['nvcc']}: 90a-real;80.")
