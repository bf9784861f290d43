"""Loading jcoll's CUDA library, which no machine of these tests has, and asking for its health."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import jax
import pytest

import jcoll
from jcoll.config import Config
from jcoll.runtime import cuda, ffi_headers


class Library(ModuleType):
    """What jcoll/_cuda.pyi says."""

    def __init__(self) -> None:
        super().__init__("jcoll._cuda")
        self.records: list[str] = []
        self.told: list = []

    def targets(self) -> dict:
        return {"jcoll_cuda_collective": {"execute": "a capsule"}}

    def architectures(self) -> list[str]:
        return ["sm_90a"]

    def why_no_code(self, compute_capability: int) -> str:
        return "" if compute_capability == 90 else "compiled for 90a"

    def check_health(self) -> list[str]:
        return self.records

    def set_default_timeout(self, seconds: float) -> None:
        self.told.append(seconds)

    def set_report_folder(self, folder: str) -> None:
        self.told.append(folder)

    def set_plan_maker(self, maker) -> None:
        self.told.append(maker)

    def forget_plans(self) -> None:
        self.told.append("forget")


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(cuda, "_library", found)
    return found


def headers(monkeypatch, tmp_path, text: str | None) -> None:
    monkeypatch.setattr(ffi_headers, "folder", lambda: tmp_path)
    ffi_headers._version.cache_clear()
    if text is not None:
        (tmp_path / "collectives_c_api.h").write_text(text)


@pytest.fixture(autouse=True)
def _forget_headers():
    yield
    ffi_headers._version.cache_clear()


VERSION = """
#define XLA_FFI_Extension_Collectives_MajorVersion {}
#define XLA_FFI_Extension_Collectives_MinorVersion {}
"""


def test_health(library) -> None:
    assert jcoll.check_health() is None
    library.records = ["jcoll.all_reduce over axis 'x' called at train.py:42: rank 1 waited for 3"]
    with pytest.raises(RuntimeError, match="rank 1 waited for 3\n  Their outputs are poisoned"):
        jcoll.check_health()


def test_health_without_the_library(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "_library", None)
    assert jcoll.check_health() is None


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        (None, "none"),
        ("#define SOMETHING 1", "none"),
        (VERSION.format(1, 0), "1.0"),
        (VERSION.format(0, 0), "0.0"),
    ],
)
def test_extensions_that_do_not_do(monkeypatch, tmp_path, library, text, offered) -> None:
    headers(monkeypatch, tmp_path, text)
    assert f"(extension {offered}, not 0.1)" in str(cuda.obstacle())


def test_extensions_that_do(monkeypatch, tmp_path, library) -> None:
    headers(monkeypatch, tmp_path, VERSION.format(0, 2))
    assert cuda.obstacle() is None
    assert cuda.architectures() == ["sm_90a"]
    assert (cuda.why_no_code(90), cuda.why_no_code(100)) == ("", "compiled for 90a")


def test_headers_of_this_jaxlib() -> None:
    version = ffi_headers.api()
    assert version is not None and version >= (0, 3)
    extension = ffi_headers.collectives()
    has_it = tuple(map(int, jax.lib.__version__.split(".")[:3])) >= (0, 11, 2)
    assert (extension is not None) == has_it


def test_load(monkeypatch) -> None:
    monkeypatch.delattr(jcoll, "_cuda", raising=False)
    monkeypatch.setitem(sys.modules, "jcoll._cuda", None)
    assert cuda._load() == (None, "jcoll was built without CUDA")
    found = Library()
    monkeypatch.setitem(sys.modules, "jcoll._cuda", found)
    monkeypatch.setattr(jcoll, "_cuda", found, raising=False)
    assert cuda._load() == (found, "")
    monkeypatch.setattr(cuda, "config", SimpleNamespace(cuda=False))
    assert cuda._load() == (None, "JCOLL_CUDA=0")


def test_set_up(monkeypatch, library) -> None:
    registered = []
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda *args, **more: registered.append((args, more))
    )
    monkeypatch.setattr(cuda, "registry", SimpleNamespace(on_register=[]))
    cuda._set_up(library)
    ((args, more),) = registered
    assert args == ("jcoll_cuda_collective", {"execute": "a capsule"})
    assert more["platform"] == "CUDA"
    assert more["traits"].name == "COMMAND_BUFFER_COMPATIBLE"
    assert library.told == [300.0, b"", cuda.plans.make]
    assert cuda.registry.on_register == [library.forget_plans]


def test_setting() -> None:
    assert Config.from_environment({}).cuda
    assert not Config.from_environment({"JCOLL_CUDA": "0"}).cuda
    with pytest.raises(ValueError, match="JCOLL_CUDA='yes'"):
        Config.from_environment({"JCOLL_CUDA": "yes"})


def test_environment(monkeypatch, library, tmp_path) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    headers(monkeypatch, tmp_path, VERSION.format(0, 1))
    found = jcoll.explain()
    assert found.served and "kernels for sm_90a" in str(found)
    headers(monkeypatch, tmp_path, "")
    found = jcoll.explain()
    assert not found.served
    assert "none for gpu: XLA's own collectives (jaxlib's FFI lends no communicators" in str(found)
