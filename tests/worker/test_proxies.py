"""Every HTTP client of the worker uses the proxy and certificates that the environment names."""

from contextlib import closing
from pathlib import Path

import pytest
from helpers.network.certificates import create_server_context
from helpers.network.forward_proxy import ForwardProxy
from helpers.network.local_server import LocalServer, QuietHandler
from helpers.worker.fake_coordinator import FakeCoordinator

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.token_client import TokenClient
from barnraise.errors import CoordinatorUnreachableError, TextError
from barnraise.protocol.signing import Identity
from barnraise.text.download import TextFetcher, UnresolvedHostError, has_proxy

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


def know_no_name(host: str, port: int) -> str:
    """Resolve as a network does in which only the proxy knows names."""
    raise UnresolvedHostError(f"{host} has no address")


@pytest.fixture
def proxy(monkeypatch):
    """Return a proxy that the environment names for HTTP and HTTPS."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    proxy = ForwardProxy()
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def secure_site(tmp_path_factory):
    """Return (port, file) of a server with a certificate of its own, for site.example."""
    pem: Path = tmp_path_factory.mktemp("certificates") / "site.pem"

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            body = b'{"answer": "from the site"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = LocalServer(Handler, create_server_context(pem, "site.example"))
    yield server.port, pem
    server.close()


def test_worker_reaches_its_site_through_the_proxy(proxy):
    with closing(FakeCoordinator()) as site:
        url = f"http://site.example:{site.port}"
        with closing(CoordinatorClient(url, Identity(b"p" * 32))) as client:
            assert client.pin_mirror().key == site.identity.key
    assert proxy.targets == [f"GET site.example:{site.port}"]


def test_addresses_in_no_proxy_are_reached_directly(proxy, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    site = FakeCoordinator()
    client = CoordinatorClient(site.url, Identity(b"p" * 32))
    try:
        assert client.pin_mirror().key == site.identity.key
    finally:
        client.close()
        site.close()
    assert proxy.targets == [] and not has_proxy("http://127.0.0.1/x")


def test_script_client_uses_proxy_and_certificates(proxy, secure_site, monkeypatch):
    port, pem = secure_site
    url = f"https://site.example:{port}"
    with pytest.raises(CoordinatorUnreachableError, match="certificate"):
        TokenClient(url, "token").request("GET", "runs")
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    assert TokenClient(url, "token").request("GET", "runs") == {"answer": "from the site"}
    assert set(proxy.targets) == {f"CONNECT site.example:{port}"}


def test_text_comes_through_the_proxy_with_its_own_names(proxy, secure_site, monkeypatch, tmp_path):
    port, pem = secure_site
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with TextFetcher(know_no_name) as fetcher:
        fetcher.fetch_to(f"https://site.example:{port}/text.txt", tmp_path / "text")
    assert b"from the site" in (tmp_path / "text").read_bytes()
    assert proxy.targets == [f"CONNECT site.example:{port}"]


def test_name_in_a_private_network_is_refused_with_a_proxy_too(proxy, tmp_path):
    def lead_inside(host: str, port: int) -> str:
        raise TextError(f"{host} leads to 10.0.0.1, inside a private network")

    with TextFetcher(lead_inside) as fetcher, pytest.raises(TextError, match="private network"):
        fetcher.fetch_to("http://router.example/text.txt", tmp_path / "text")
    assert proxy.targets == []


def test_text_without_a_proxy_trusts_the_named_certificates(secure_site, monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    port, pem = secure_site
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with TextFetcher(lambda host, port: "127.0.0.1") as fetcher:
        fetcher.fetch_to(f"https://site.example:{port}/text.txt", tmp_path / "text")
    assert b"from the site" in (tmp_path / "text").read_bytes()
