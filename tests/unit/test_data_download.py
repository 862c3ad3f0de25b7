"""Fetching CIFAR-10, from a server on this host that hands out tiny archives."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.data import download
from shoal.data.download import fetch_cifar10
from shoal.data.formats import CIFAR10_FOLDER, CIFAR10_TEST, CIFAR10_TRAIN
from shoal.errors import InputError

NAMES = [*CIFAR10_TRAIN, CIFAR10_TEST]


def archive(names: list[str], n_bytes: int = 3073) -> bytes:
    """A gzipped tar of files with these names, each of `n_bytes` bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = n_bytes
            tar.addfile(member, io.BytesIO(bytes(n_bytes)))
    return packed.getvalue()


class Site:
    """Serves `content` under any address and counts the requests."""

    def __init__(self) -> None:
        site = self
        self.content = b""
        self.requests = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests += 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(site.content)))
                self.end_headers()
                self.wfile.write(site.content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/cifar-10-binary.tar.gz"

    def checksum(self) -> str:
        return f"md5:{hashlib.md5(self.content).hexdigest()}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "CIFAR10_RECORDS", 1)
    served = Site()
    thread = threading.Thread(target=served.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()


def test_fetch_unpacks_the_data_files_once(site: Site, tmp_path: Path) -> None:
    site.content = archive([f"{CIFAR10_FOLDER}/{name}" for name in (*NAMES, "readme.html")])
    calls: list[tuple[int, int]] = []
    folder = fetch_cifar10(tmp_path, site.url, site.checksum(), lambda *sizes: calls.append(sizes))
    assert folder == tmp_path / CIFAR10_FOLDER
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == [CIFAR10_FOLDER]
    assert calls[-1] == (len(site.content), len(site.content))
    fetch_cifar10(tmp_path, site.url, site.checksum())
    assert site.requests == 1


def test_an_archive_cannot_write_elsewhere(site: Site, tmp_path: Path) -> None:
    site.content = archive([f"../../outside/{name}" for name in NAMES] + ["../evil.bin", "/tmp/evil.bin"])
    root = tmp_path / "a" / "b"
    folder = fetch_cifar10(root, site.url, site.checksum())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(folder / name for name in NAMES)


def test_another_archive_is_refused(site: Site, tmp_path: Path) -> None:
    site.content = archive([f"{CIFAR10_FOLDER}/{name}" for name in NAMES])
    with pytest.raises(InputError, match=r"could not be fetched from http.*hash"):
        fetch_cifar10(tmp_path, site.url)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_without_a_file_is_refused(site: Site, tmp_path: Path) -> None:
    site.content = archive([f"{CIFAR10_FOLDER}/{name}" for name in NAMES[:-1]])
    with pytest.raises(InputError, match=r"the archive lacks test_batch\.bin"):
        fetch_cifar10(tmp_path, site.url, site.checksum())


def test_an_archive_that_is_none_is_refused(site: Site, tmp_path: Path) -> None:
    site.content = b"<html>moved</html>"
    with pytest.raises(InputError, match="could not be fetched"):
        fetch_cifar10(tmp_path, site.url, site.checksum())


def test_a_site_that_is_away_is_named(site: Site, tmp_path: Path) -> None:
    site.server.shutdown()
    site.server.server_close()
    with pytest.raises(InputError, match=r"could not be fetched from http://127\.0\.0\.1"):
        fetch_cifar10(tmp_path, site.url)
