"""Every HTTP client of the worker uses the proxy and certificates that the environment names."""

import re
from contextlib import closing
from pathlib import Path

import pytest
from helpers.network.certificates import create_server_context
from helpers.network.forward_proxy import ForwardProxy
from helpers.network.local_server import LocalServer, QuietHandler
from helpers.network.socks_proxy import SocksProxy
from helpers.worker.fake_coordinator import FakeCoordinator
from helpers.worker.fake_hub import open_writable_hub
from helpers.worker.trained_models import bpe_file
from huggingface_hub import close_session, constants

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.token_client import TokenClient
from barnraise.errors import CoordinatorUnreachableError, TextError, TextUnreachableError
from barnraise.protocol import http_client
from barnraise.protocol.certificates import VARIABLES
from barnraise.protocol.signing import Identity
from barnraise.text.download import TextFetcher, UnresolvedHostError
from barnraise.text.existing_tokenizer import load_existing_tokenizer
from barnraise.text.hub_files import find_in_dataset
from barnraise.text.places import HubPlace

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", *VARIABLES)


def clear_variables(monkeypatch) -> None:
    """Let the environment name no proxy and no certificates."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def know_no_name(host: str, port: int) -> str:
    """Resolve as a network does in which only the proxy knows names."""
    raise UnresolvedHostError(f"{host} has no address")


@pytest.fixture
def proxy(monkeypatch):
    """Return a proxy that the environment names for HTTP and HTTPS."""
    clear_variables(monkeypatch)
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
    monkeypatch.setenv("NO_PROXY", "[::1],127.0.0.0/8")
    site = FakeCoordinator()
    client = CoordinatorClient(site.url, Identity(b"p" * 32))
    try:
        assert client.pin_mirror().key == site.identity.key
    finally:
        client.close()
        site.close()
    assert proxy.targets == []


@pytest.mark.parametrize("credentials", ["", "ada:g%40h"])
def test_worker_reaches_its_site_and_text_by_socks(monkeypatch, tmp_path, credentials):
    clear_variables(monkeypatch)
    socks = SocksProxy(credentials.replace("%40", "@"))
    place = f"{credentials}@{socks.place}" if credentials else socks.place
    monkeypatch.setenv("ALL_PROXY", f"socks5://{place}")
    site = FakeCoordinator()
    client = CoordinatorClient(f"http://site.example:{site.port}", Identity(b"p" * 32))
    try:
        assert client.pin_mirror().key == site.identity.key
        with TextFetcher(know_no_name) as fetcher:
            fetcher.fetch_to(f"http://text.example:{site.port}/api/v1/mirror", tmp_path / "text")
    finally:
        client.close()
        site.close()
        socks.close()
    assert socks.targets == [f"site.example:{site.port}", f"text.example:{site.port}"]


class AnsweringProxy(LocalServer):
    """A proxy that answers every request with one status."""

    def __init__(self, status: int) -> None:
        class Handler(QuietHandler):
            def do_GET(self) -> None:
                self.send_response(status, "as the test says")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_CONNECT = do_GET

        super().__init__(Handler)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("status", "kind", "sentence"),
    [
        (0, "http", "the proxy http://{place} of ALL_PROXY does not answer: Connection refused"),
        (0, "socks5", "the proxy socks5://{place} of ALL_PROXY does not answer"),
        (407, "http", "the proxy http://{place} of ALL_PROXY refuses: 407"),
        (403, "http", "the proxy http://{place} of ALL_PROXY"),
        (403, "socks5", "the proxy socks5://{place} of ALL_PROXY"),
    ],
)
def test_proxy_that_fails_is_named_without_its_password(
    monkeypatch, scheme, status, kind, sentence
):
    clear_variables(monkeypatch)
    monkeypatch.setattr(http_client, "HANDSHAKE_SECONDS", 0.2)  # for what waits for a line's end
    proxy = AnsweringProxy(status)
    if not status:
        proxy.close()
    place = f"127.0.0.1:{proxy.port}"
    monkeypatch.setenv("ALL_PROXY", f"{kind}://ada:geheim@{place}")
    url = f"{scheme}://site.example"
    try:
        for call in (
            CoordinatorClient(url, Identity(b"p" * 32)).pin_mirror,
            lambda: TokenClient(url, "token").request_json("GET", "runs"),
        ):
            with pytest.raises(CoordinatorUnreachableError) as failure:
                call()
            assert sentence.format(place=place) in str(failure.value)
            assert "geheim" not in str(failure.value) and url in str(failure.value)
            assert ("NAME:PASSWORD@HOST" in str(failure.value)) == (status == 407)
    finally:
        proxy.close()


def test_variable_that_names_no_proxy_is_a_sentence(monkeypatch):
    clear_variables(monkeypatch)
    monkeypatch.setenv("HTTPS_PROXY", "ftp://ada:geheim@127.0.0.1:21")
    client = CoordinatorClient("https://site.example", Identity(b"p" * 32))
    with pytest.raises(
        CoordinatorUnreachableError, match=r"HTTPS_PROXY names 'ftp://127.0.0.1:21'"
    ):
        client.pin_mirror()


def test_host_that_cannot_be_looked_up_is_a_sentence(monkeypatch):
    """As a list of mirrors or a redirect may name it."""
    clear_variables(monkeypatch)
    with pytest.raises(CoordinatorUnreachableError, match=r"a\.\.b does not answer"):
        CoordinatorClient("https://a..b", Identity(b"p" * 32)).pin_mirror()


def test_hub_is_asked_through_the_proxy_and_names_it(monkeypatch, tmp_path):
    clear_variables(monkeypatch)
    hub = open_writable_hub(monkeypatch, tmp_path)
    hub.repositories["models/ada/model"] = {"tokenizer.json": bpe_file(300)}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    socks = SocksProxy()
    monkeypatch.setenv("ALL_PROXY", f"socks5://{socks.place}")
    monkeypatch.setenv("NO_PROXY", "[::1],rubbish:x")
    try:
        assert load_existing_tokenizer("hf:ada/model").file
        assert set(socks.targets) == {hub.url.removeprefix("http://")}
        socks.close()
        sentence = f"the proxy socks5://{socks.place} of ALL_PROXY does not answer"
        with pytest.raises(TextUnreachableError, match=re.escape(sentence)):
            find_in_dataset(HubPlace("ada/other"))
        missing = tmp_path / "ca.pem"
        monkeypatch.setenv("SSL_CERT_FILE", str(missing))
        sentence = f"SSL_CERT_FILE names {missing}, which does"
        with pytest.raises(TextError, match=re.escape(sentence)):
            load_existing_tokenizer("hf:ada/other")
    finally:
        hub.close()
        close_session()


def test_script_client_uses_proxy_and_certificates(proxy, secure_site, monkeypatch):
    port, pem = secure_site
    url = f"https://site.example:{port}"
    with pytest.raises(CoordinatorUnreachableError, match="certificate"):
        TokenClient(url, "token").request_json("GET", "runs")
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    assert TokenClient(url, "token").request_json("GET", "runs") == {"answer": "from the site"}
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
    clear_variables(monkeypatch)
    port, pem = secure_site
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with TextFetcher(lambda host, port: "127.0.0.1") as fetcher:
        fetcher.fetch_to(f"https://site.example:{port}/text.txt", tmp_path / "text")
    assert b"from the site" in (tmp_path / "text").read_bytes()
