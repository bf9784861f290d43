"""For which GPUs CMake has the kernels compiled, with an nvcc that is made up.

CMake runs a script here: a project would look for a compiler first."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).resolve().parent.parent / "cmake" / "JcollCudaCompiler.cmake"
CMAKE = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake")


def choose(tmp_path: Path, archs: str, are_asked_for: bool) -> tuple[int, str]:
    """With an nvcc that knows sm_75 to sm_100. Exit status and what CMake says, as one line."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'sm_75\\nsm_80\\nsm_90\\nsm_100\\n'\n")
    nvcc.chmod(0o755)
    return cmake(
        tmp_path,
        "OFF",
        f"include({MODULE})\nset(CMAKE_CUDA_COMPILER {nvcc})\n"
        f'jcoll_choose_archs("{archs}" {str(are_asked_for).upper()} chosen)\n'
        'message(STATUS "chosen: ${chosen}.")\n',
    )


def cmake(tmp_path: Path, jcoll_cuda: str, text: str) -> tuple[int, str]:
    script = tmp_path / "script.cmake"
    script.write_text(f"cmake_minimum_required(VERSION 3.20)\n{text}")  # As the project does.
    command = [str(CMAKE), f"-DJCOLL_CUDA={jcoll_cuda}", "-P", script]
    done = subprocess.run(command, capture_output=True, text=True)
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
