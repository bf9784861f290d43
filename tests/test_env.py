"""scripts/env.py: the headers that it unpacks."""

import zipfile

import project_scripts
import pytest

env = project_scripts.load("env")

PIN = "jaxlib==0.11.2"
HEADERS = [f"jaxlib/include/xla/ffi/api/{name}.h" for name in ("ffi", "collectives_c_api")]


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """pip downloads this one."""

    def pip(*args, doing):
        folder = args[args.index("-d") + 1]
        with zipfile.ZipFile(f"{folder}/a.whl", "w") as archive:
            for name in ["jaxlib/__init__.py", *HEADERS]:
                archive.writestr(name, name)

    monkeypatch.setattr(env, "ROOT", tmp_path)
    monkeypatch.setattr(env, "pip", pip)


def test_headers_are_unpacked_once(wheel, monkeypatch, tmp_path):
    folder = env.headers_of(PIN)
    assert folder == tmp_path / "build" / "ffi" / "jaxlib-0.11.2" / "jaxlib" / "include"
    assert all((folder.parent.parent / name).read_text() == name for name in HEADERS)
    assert not (folder.parent / "__init__.py").exists()
    assert [path.name for path in (tmp_path / "build" / "ffi").iterdir()] == ["jaxlib-0.11.2"]
    monkeypatch.setattr(env, "pip", None)
    assert env.headers_of(PIN) == folder


def test_unpacking_that_is_interrupted_is_done_again(wheel, monkeypatch):
    extract = zipfile.ZipFile.extractall

    def interrupted(archive, path, members):
        extract(archive, path, members[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(zipfile.ZipFile, "extractall", interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.headers_of(PIN)
    folder = env.headers_of(PIN)
    assert all((folder.parent.parent / name).exists() for name in HEADERS)
