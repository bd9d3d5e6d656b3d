"""List the fields of all messages, to compare those of two versions.

Usage: `.venv/bin/python tests/helpers/contract/message_shapes.py > tests/contract/released.json`
at each release, with the release's packages on PYTHONPATH.
"""

import importlib
import json
import pkgutil
import sys
from typing import Any


def describe_messages() -> dict[str, dict[str, Any]]:
    """Return message → its kind between peers ("" otherwise), its fields, and which it requires."""
    from barnraise import protocol
    from barnraise.protocol.types import Message

    shapes = {}
    for module in pkgutil.iter_modules(protocol.__path__):
        values = vars(importlib.import_module(f"barnraise.protocol.{module.name}")).values()
        for value in values:
            if not (isinstance(value, type) and issubclass(value, Message)) or value is Message:
                continue
            fields = value.model_fields
            kind = fields["type"].default if "type" in fields else ""
            required = sorted(name for name, field in fields.items() if field.is_required())
            shapes[value.__name__] = {
                "kind": kind,
                "fields": sorted(fields),
                "required": required,
            }
    return dict(sorted(shapes.items()))


if __name__ == "__main__":
    json.dump(describe_messages(), sys.stdout, indent=1)
    sys.stdout.write("\n")
