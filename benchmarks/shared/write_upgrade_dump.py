"""Store a site of a release for tests/platform/upgrade, which lets the newest code upgrade it.

Usage: `.venv/bin/python benchmarks/shared/write_upgrade_dump.py v0.2.0` after the tag is made. The
release's own code creates the site: people, machines, a run in training with a day of reports,
verdicts, and the log of another mirror. Its own command backs the site up.
"""

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from released_code import ROOT, ReleasedCode, extract_code

TARGET = ROOT / "tests" / "platform" / "upgrade"
MAX_BYTES = 300_000
PASSWORD = "raise-the-frame-7"
# The names in braces are modules of the release's own tests, wherever they lie there.
CREATE = """
import json
from django.core.management import call_command
from coordinator.accounts.models import Team, User
from coordinator.eventlog import ingest, projection
from {page_fixtures} import create_examples
from {second_factor} import add_authenticator_app
from {event_log_builder} import LogBuilder
email = "ida@example.org"
call_command("prepare_owner", email=email, password={password!r}, name="Ida", staff=True)
add_authenticator_app(User.objects.get(email=email))
names = json.loads(create_examples())
log = LogBuilder()
log.append("team.rename", Team.objects.get().pk, {{"name": "The weavers of another mirror"}})
assert ingest.ingest_events(log.events).stored == 2
print(json.dumps({{"names": names, "state_hash": projection.state_hash()}}))
"""
HELPERS = ("page_fixtures", "second_factor", "event_log_builder")


def main() -> int:
    """Write the dump of the release that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commit", help="a tag such as v0.2.0, or a commit")
    commit = parser.parse_args().commit
    sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "worker")]
    from coordinator.lib.embedded import embedded_servers

    scratch = Path(tempfile.mkdtemp(prefix="barnraise-release-"))
    scratch.chmod(0o755)  # Postgres runs as a user of its own where root runs this
    state = scratch / "state"
    try:
        code = extract_code(commit, scratch / "code")
        database, valkey = embedded_servers.start(state, durable=False)
        environment = {
            "DATABASE_URL": database,
            "REDIS_URL": valkey,
            "BARNRAISE_STATE": str(state),
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
        }
        code.manage(environment, "migrate", "--verbosity", "0")
        program = CREATE.format(password=PASSWORD, **find_helpers(code))
        facts = code.manage(environment, "shell", "-v", "0", "-c", program).splitlines()[-1]
        backup = scratch / "backup"
        code.manage(environment, "backup", str(backup))
        facts = json.dumps({"password": PASSWORD, **json.loads(facts)}, indent=1)
        (backup / "facts.json").write_text(facts)
        target = TARGET / f"{commit}.tar.xz"
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for path in sorted(backup.iterdir()):
                archive.add(path, path.name)
    finally:
        embedded_servers.stop(state, force=True)
        shutil.rmtree(scratch, ignore_errors=True)
    size = target.stat().st_size
    print(f"{target.relative_to(ROOT)}: {size:,} bytes")
    return 0 if size <= MAX_BYTES else 1


def find_helpers(code: ReleasedCode) -> dict[str, str]:
    """Return the import path of each helper in the release's tests."""
    tests = code.root / "tests"
    found = {}
    for name in HELPERS:
        (path,) = (tests / "helpers").rglob(f"{name}.py")
        found[name] = ".".join(path.relative_to(tests).with_suffix("").parts)
    return found


if __name__ == "__main__":
    os.environ.pop("DATABASE_URL", None)
    os.environ.pop("REDIS_URL", None)
    sys.exit(main())
