"""List the fields of all events of a mirror's log, to compare those of two versions.

Usage: `python tests/helpers/contract/event_shapes.py > tests/contract/released_events.json`
at each release, with the release's packages on PYTHONPATH.
"""

import json
import os
import sys


def describe_events() -> dict[str, str]:
    """Return event type → the fields of its payload, with blanks between them."""
    from coordinator.eventlog import registry

    return {
        f"{name}.{action}": " ".join(sorted(payload.model_fields))
        for name, aggregate_type in sorted(registry.aggregate_types().items())
        for action, payload in sorted(aggregate_type.payload_types.items())
    }


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "coordinator.settings"
    # Neither is called; without them, the site would start its own.
    os.environ |= {"DATABASE_URL": "postgresql://nobody@/nothing", "REDIS_URL": "redis://nobody"}
    import django

    django.setup()
    json.dump(describe_events(), sys.stdout, indent=1)
    sys.stdout.write("\n")
