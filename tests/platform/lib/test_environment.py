"""Test that settings mean what people type, and that a wrong one ends the site with a sentence."""

import re
import runpy
import sys
from ipaddress import ip_network

import pytest
from helpers.paths import ROOT

from coordinator.lib import environment

SETTINGS = ROOT / "platform" / "coordinator" / "settings.py"
TABLE = re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs" / "operate.md").read_text(), re.M)
SECRET = "hunter2"


def load(monkeypatch, **variables: str) -> dict:
    """Run settings.py with these variables, and only the servers' beyond them."""
    for name in (*TABLE, "BARNRAISE_DEBUG"):
        if name not in ("BARNRAISE_STATE", "DATABASE_URL", "REDIS_URL"):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(str(SETTINGS))


def refuse(monkeypatch, capsys, variable: str, value: str) -> str:
    """Run settings.py, which must end the process, and return the sentence that it prints."""
    with pytest.raises(SystemExit):
        load(monkeypatch, **{variable: value})
    printed = capsys.readouterr().err
    assert printed.startswith(f"{variable}: ") and printed.count("\n") == 1
    return printed.strip()


@pytest.mark.parametrize(
    ("variable", "typed", "setting", "expected"),
    [
        ("BARNRAISE_HOSTS", "a.example, b.example", "ALLOWED_HOSTS", ["a.example", "b.example"]),
        (
            "BARNRAISE_HOSTS",
            "'a.example' b.example/\n",
            "ALLOWED_HOSTS",
            ["a.example", "b.example"],
        ),
        (
            "BARNRAISE_HOSTS",
            '"A.example.","b.example",',
            "ALLOWED_HOSTS",
            ["a.example", "b.example"],
        ),
        ("BARNRAISE_HOSTS", ".example.org,::1,*", "ALLOWED_HOSTS", [".example.org", "[::1]", "*"]),
        ("BARNRAISE_HOSTS", "*.A.org,[0:0::1]", "ALLOWED_HOSTS", [".a.org", "[::1]"]),
        ("BARNRAISE_ORIGINS", "https://a.org:", "CSRF_TRUSTED_ORIGINS", ["https://a.org"]),
        ("BARNRAISE_HTTPS", "true", "HTTPS", True),
        ("BARNRAISE_HTTPS", " 'Yes' ", "HTTPS", True),
        ("BARNRAISE_HTTPS", "ON", "SESSION_COOKIE_SECURE", True),
        ("BARNRAISE_HTTPS", "off", "HTTPS", False),
        ("BARNRAISE_HTTPS", "False", "HTTPS", False),
        (
            "BARNRAISE_ORIGINS",
            "https://Barn.example.org/, https://*.example.org:443 http://h:8000",
            "CSRF_TRUSTED_ORIGINS",
            ["https://barn.example.org", "https://*.example.org", "http://h:8000"],
        ),
        (
            "BARNRAISE_ORIGINS",
            "https://*.a.example,https://b.example",
            "SITE_URL",
            "https://b.example",
        ),
        ("BARNRAISE_HOSTS", ".example.org", "SITE_URL", "http://example.org"),
        ("BARNRAISE_URL", '"https://barn.example.org/"', "SITE_URL", "https://barn.example.org"),
        ("BARNRAISE_URL", "http://[::1]:8000", "SITE_URL", "http://[::1]:8000"),
        ("BARNRAISE_HSTS", "0", "SECURE_HSTS_SECONDS", 0),
        ("BARNRAISE_HSTS", " 3600 ", "SECURE_HSTS_SECONDS", 3600),
        (
            "BARNRAISE_PROXIES",
            "10.0.0.5 ::ffff:10.0.0.6,[::1], 'fd00::/8' ::ffff:172.16.0.0/108 Unix",
            "PROXIES",
            [
                ip_network(text)
                for text in ("10.0.0.5", "10.0.0.6", "::1", "fd00::/8", "172.16.0.0/12")
            ],
        ),
        ("BARNRAISE_PROXIES", "UNIX", "UNIX_PROXY", True),
        ("BARNRAISE_NETWORKS", "10.0.0.0/8, ", "OUTSIDE_NETWORKS", [ip_network("10.0.0.0/8")]),
        ("BARNRAISE_LOG", "debug", "LOGGING", "DEBUG"),
        ("BARNRAISE_AUDIT_DAYS", "0", "AUDIT_DAYS", 0),
        ("BARNRAISE_VOLUNTEER_FLOPS", "'2e14'", "VOLUNTEER_FLOPS", 2e14),
        ("BARNRAISE_CREDIT_SECONDS", "60", "CREDIT_SECONDS", 60.0),
        (
            "BARNRAISE_RELAYS",
            "Default, https://r.example/",
            "RELAYS",
            ["default", "https://r.example"],
        ),
        (
            "BARNRAISE_RELAYS",
            "https://r\u00e9lais.example",
            "RELAYS",
            ["https://xn--rlais-bsa.example"],
        ),
        ("BARNRAISE_RELAYS", "None", "RELAYS", []),
        ("REDIS_URL", "'redis://:pw@cache:6379/0/'", "REDIS_URL", "redis://:pw@cache:6379/0/"),
        ("REDIS_URL", "redis://cache:6379/1/", "CELERY_BROKER_URL", "redis://cache:6379/1"),
        ("EMAIL_URL", "smtp://mail:25?starttls=off", "EMAIL_USE_TLS", False),
        (
            "EMAIL_FROM",
            '"Barn <barn@example.org>"',
            "DEFAULT_FROM_EMAIL",
            "Barn <barn@example.org>",
        ),
    ],
)
def test_settings_mean_what_people_type(monkeypatch, variable, typed, setting, expected):
    value = load(monkeypatch, **{variable: typed})[setting]
    assert (value["root"]["level"] if setting == "LOGGING" else value) == expected


@pytest.mark.parametrize("empty", ["", "  ", '""', " , "])
def test_empty_variable_means_the_default(monkeypatch, empty):
    names = [name for name in TABLE if name not in ("BARNRAISE_STATE", "DATABASE_URL", "REDIS_URL")]
    simple = (str, int, float, bool, list)
    kept = {name for name, value in load(monkeypatch).items() if isinstance(value, simple)}
    defaults = load(monkeypatch)
    values = load(monkeypatch, **dict.fromkeys(names, empty))
    assert len(kept) > 50 and {n: values[n] for n in kept} == {n: defaults[n] for n in kept}


@pytest.mark.parametrize(
    ("variable", "wrong"),
    [
        ("BARNRAISE_HOSTS", "https://a.example"),
        ("BARNRAISE_HOSTS", "a.example:8000"),
        ("BARNRAISE_HOSTS", "a..example"),
        ("BARNRAISE_HOSTS", "bärn.example"),
        ("BARNRAISE_HOSTS", f"{'a' * 60}:8000"),
        ("BARNRAISE_HOSTS", "a.example;b.example"),
        ("BARNRAISE_HOSTS", "1::2::3"),
        ("BARNRAISE_HOSTS", "[::1"),
        ("BARNRAISE_HOSTS", "::1]"),
        ("BARNRAISE_HOSTS", "[10.0.0.5]"),
        ("BARNRAISE_HOSTS", "a." * 130 + "example"),
        ("BARNRAISE_ORIGINS", "https://a.example:0"),
        ("BARNRAISE_ORIGINS", "https://a<b"),
        ("BARNRAISE_TERMS", "https://lab example/terms"),
        ("BARNRAISE_HTTPS", "maybe"),
        ("BARNRAISE_LOG_JSON", "json"),
        ("BARNRAISE_ORIGINS", "barn.example.org"),
        ("BARNRAISE_URL", "https://lab.example/barn/"),
        ("BARNRAISE_URL", "ftp://lab.example"),
        ("BARNRAISE_URL", "https://a..b.invalid"),
        ("BARNRAISE_URL", "https://lab.example:port"),
        ("BARNRAISE_URL", "https://*.lab.example"),
        ("BARNRAISE_URL", "https://[::1]x"),
        ("BARNRAISE_ORIGINS", "https://*.a..example"),
        ("BARNRAISE_PROXIES", "nginx"),
        ("BARNRAISE_PROXIES", "10.0.0.5/8"),
        ("BARNRAISE_PROXIES", "[::1"),
        ("BARNRAISE_PROXIES", "::ffff:10.0.0.0/90"),
        ("BARNRAISE_NETWORKS", "unix"),
        ("BARNRAISE_LOG", "LOUD"),
        ("BARNRAISE_HSTS", "1 year"),
        ("BARNRAISE_HSTS", "-1"),
        ("BARNRAISE_AUDIT_DAYS", "1.5"),
        ("BARNRAISE_AUDIT_DAYS", "inf"),
        ("BARNRAISE_VOLUNTEER_MACHINES", "0"),
        ("BARNRAISE_VOLUNTEER_FLOPS", "nan"),
        ("BARNRAISE_VOLUNTEER_FLOPS", "0"),
        ("BARNRAISE_CREDIT_SECONDS", "0"),
        ("BARNRAISE_RELAYS", "http://relay.example"),
        ("BARNRAISE_RELAYS", "https://relay..example"),
        ("BARNRAISE_RELAYS", "https://relay.example/?a=b"),
        ("BARNRAISE_RELAYS", "https://*.relay.example"),
        ("BARNRAISE_RELAYS", "https://relay.example:99999"),
        ("BARNRAISE_IMPRINT", "example.org/imprint"),
        ("BARNRAISE_TERMS", "javascript:alert(1)"),
        ("BARNRAISE_STATE", f"{SETTINGS}/state"),
        ("BARNRAISE_STATE", "~nobody-here/state"),
        ("DATABASE_URL", "mysql://db/barn"),
        ("DATABASE_URL", "postgresql://db"),
        ("REDIS_URL", "redis://cache/barn"),
        ("EMAIL_URL", "mail.example.org:587"),
        ("EMAIL_URL", "smtp://mail/x"),
        ("EMAIL_URL", "file://folder"),
        ("EMAIL_FROM", "Barnraise"),
        ("EMAIL_FROM", "Barn <barn@example.org"),
        ("EMAIL_FROM", "Barn barn@example.org"),
        ("EMAIL_FROM", "barn@example.org>"),
    ],
)
def test_wrong_setting_ends_with_its_name_and_value(monkeypatch, capsys, variable, wrong):
    assert f"{variable}: '{wrong}' " in refuse(monkeypatch, capsys, variable, wrong)


def test_folder_below_home_is_found_without_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.parse_folder("~/state") == tmp_path / "state"
    assert (tmp_path / "state").is_dir()


def test_refused_proxy_is_named_among_right_ones(monkeypatch, capsys):
    assert refuse(monkeypatch, capsys, "BARNRAISE_PROXIES", "10.0.0.5, nginx") == (
        "BARNRAISE_PROXIES: 'nginx' is no address or network; name the proxy's address, like "
        "10.0.0.5, or unix"
    )


@pytest.mark.parametrize(
    ("variable", "wrong"),
    [
        ("DATABASE_URL", f"mysql://barn:{SECRET}@db/barn"),
        ("DATABASE_URL", f"postgresql://barn:{SECRET}#x@db/barn"),
        ("DATABASE_URL", f"postgresql://barn:12/{SECRET}@db/barn"),
        ("DATABASE_URL", f"postgresql://db:x/barn?password={SECRET}"),
        ("REDIS_URL", f"redis://:{SECRET}"),
        ("REDIS_URL", f"redis://:12#{SECRET}@cache/0"),
        ("EMAIL_URL", f"smtp:barn:{SECRET}"),
        ("EMAIL_URL", f"mail://barn:{SECRET}@mail"),
        ("BARNRAISE_URL", f"https://barn:{SECRET}@barn.example.org"),
        ("BARNRAISE_HOSTS", f"https://barn:{SECRET}@barn.example.org"),
        ("BARNRAISE_ORIGINS", f"https://{SECRET}@barn.example.org"),
        ("BARNRAISE_PROXIES", f"http://barn:{SECRET}@10.0.0.5"),
        ("BARNRAISE_RELAYS", f"https://barn:{SECRET}@relay.example.org"),
        ("SENTRY_DSN", SECRET),
        ("SENTRY_DSN", f"https://{SECRET}@errors.example.org/1"),
    ],
)
def test_refusal_shows_no_password(monkeypatch, capsys, variable, wrong):
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    assert SECRET not in refuse(monkeypatch, capsys, variable, wrong)


def test_folder_may_lie_below_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.parse_folder("~/state") == tmp_path / "state"


def test_text_that_is_a_secret_is_checked_and_not_shown():
    form = {"form": "[0-9a-f]{4}", "expected": "is no key", "secret": True}
    assert environment.parse_text("00fF", **form) == "00fF"
    with pytest.raises(environment.SettingError, match=r"^its value is no key$"):
        environment.parse_text(SECRET, **form)


def test_no_text_ends_a_parser_in_another_way():
    parsers = [
        getattr(environment, name)
        for name in dir(environment)
        if name.startswith("parse_") and name not in ("parse_ip", "parse_text")
    ]
    texts = [
        "[",
        "[::1",
        "http://[",
        "a" * 70,
        "ﬀ..",
        "\udcff",
        "1e999",
        "::%",
        "0/0",
        "~x/y",
        "http://a:0",
    ]
    assert len(parsers) >= 8
    for parse in parsers:
        for text in texts if parse is not environment.parse_folder else ["~nobody-here/x"]:
            try:
                parse(text)
            except environment.SettingError as error:
                assert str(error)
