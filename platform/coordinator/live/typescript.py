"""Generate `frontend/src/types.ts` from the models of the messages to pages.

After a change of `live_messages.py` or of a report that pages show, run
`PYTHONPATH=platform:worker .venv/bin/python -m coordinator.live.typescript`.
A test fails while the committed file differs.
"""

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from coordinator.live.live_messages import MESSAGES

TYPES_FILE = Path(__file__).resolve().parents[3] / "frontend" / "src" / "types.ts"
HEADER = """\
// The messages to the page of a run. This file is generated from
// platform/coordinator/live/live_messages.py: edit that file, then run
// `PYTHONPATH=platform:worker .venv/bin/python -m coordinator.live.typescript`.
"""
_PRIMITIVES = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}
_REFERENCE = "#/$defs/"

JsonSchema = dict[str, Any]


def generate_types() -> str:
    """Return the text of `types.ts`: one exported type for each model, in alphabetical order."""
    _, schema = models_json_schema([(model, "validation") for model in MESSAGES])
    definitions = schema["$defs"]
    names = {name: part.get("title", name) for name, part in definitions.items()}
    types = {
        names[name]: _render_declaration(names[name], definitions[name], names) for name in names
    }
    return "\n".join([HEADER, *(types[name] for name in sorted(types))])


def _render_declaration(name: str, schema: JsonSchema, names: dict[str, str]) -> str:
    """Return an interface for an object, and a type alias for everything else."""
    comment = _render_comment(schema.get("description", ""), indent="")
    if schema.get("type") != "object":
        return f"{comment}export type {name} = {_render_type(schema, names)};\n"
    required = schema.get("required", [])
    lines = []
    for field, part in schema["properties"].items():
        lines.append(_render_comment(part.get("description", ""), indent="  "))
        optional = "" if field in required else "?"
        lines.append(f"  {field}{optional}: {_render_type(part, names)};\n")
    return f"{comment}export interface {name} {{\n{''.join(lines)}}}\n"


def _render_type(schema: JsonSchema, names: dict[str, str]) -> str:
    """Return the TypeScript type of the values that a schema permits."""
    if "$ref" in schema:
        return names[schema["$ref"].removeprefix(_REFERENCE)]
    if "anyOf" in schema:
        return " | ".join(_render_type(part, names) for part in schema["anyOf"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if schema["type"] == "object":
        return f"Record<string, {_render_type(schema['additionalProperties'], names)}>"
    if "prefixItems" in schema:
        return f"[{', '.join(_render_type(part, names) for part in schema['prefixItems'])}]"
    if schema["type"] == "array":
        return f"{_render_type(schema['items'], names)}[]"
    return _PRIMITIVES[schema["type"]]


def _render_comment(text: str, indent: str) -> str:
    """Return a JSDoc comment with the text, or nothing if there is none."""
    lines = text.splitlines()
    if not lines:
        return ""
    if len(lines) == 1:
        return f"{indent}/** {lines[0]} */\n"
    body = "".join(f"{indent} * {line}".rstrip() + "\n" for line in lines)
    return f"{indent}/**\n{body}{indent} */\n"


if __name__ == "__main__":
    TYPES_FILE.write_text(generate_types(), encoding="utf-8")
