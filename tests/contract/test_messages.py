"""Golden JSON that both sides must be able to read, and bounds that exclude weights and text."""

import importlib
import json
import pkgutil
import types
import typing
from enum import StrEnum
from pathlib import Path

import annotated_types
import pytest
from helpers.contract.api_messages import API_MESSAGES
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from barnraise import protocol
from barnraise.errors import MessageError
from barnraise.ledger import verdict_set as verdicts
from barnraise.peering.transports import framing
from barnraise.protocol import coordinator_messages, messages, reports, trials
from barnraise.protocol import types as types_module
from barnraise.protocol.signing import Identity, TicketPolicy, check_ticket, open_signed
from barnraise.spec import PRESETS, preset

GOLDEN = Path(__file__).parent / "golden"
AUTHOR, MIRROR = Identity(bytes(range(32))), Identity(bytes(range(32, 64)))


def standalone_messages() -> dict[str, type[types_module.Message]]:
    """Return every message type that can stand alone, by the name of its golden file."""
    nested = {
        reports.CheckpointView,
        reports.Sample,
        reports.SamplesView,
        messages.FragmentUpdate,
        messages.CrewShare,
        reports.HardwareView,
        coordinator_messages.Shard,
        coordinator_messages.TextCounts,
        messages.Peer,
        reports.PlanView,
        reports.MeasuredLoss,
        reports.Report,
        coordinator_messages.RunSummary,
        coordinator_messages.SignedHeader,
        coordinator_messages.SignedStatement,
        reports.CrewSeatView,
        reports.ExchangeView,
        reports.LimitsView,
        reports.LinkView,
        reports.LogLine,
        reports.PauseView,
        reports.SystemView,
    }
    excluded = {types_module.Message, *nested}
    modules = (messages, coordinator_messages, verdicts, trials)
    values = [value for module in modules for value in vars(module).values()]
    message_types = [
        value
        for value in values
        if isinstance(value, type)
        and issubclass(value, types_module.Message)
        and value not in excluded
    ]
    return {snake_case(message_type.__name__): message_type for message_type in message_types}


def snake_case(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def read_golden(name: str) -> str:
    return (GOLDEN / f"{name}.json").read_text()


def test_every_message_has_a_golden_file():
    assert {p.stem for p in GOLDEN.glob("*.json")} >= set(standalone_messages())


@pytest.mark.parametrize("name", standalone_messages())
def test_message_reads_its_golden_file_and_writes_it_again(name):
    message = standalone_messages()[name].model_validate_json(read_golden(name))
    assert json.loads(message.model_dump_json()) == json.loads(read_golden(name))


@pytest.mark.parametrize("name", standalone_messages())
def test_message_with_unknown_fields_is_read(name):
    message_type = standalone_messages()[name]
    extended = json.loads(read_golden(name)) | {"from_the_future": {"anything": [1, 2]}}
    expected = message_type.model_validate_json(read_golden(name))
    assert message_type.model_validate(extended) == expected


PEER_MESSAGES = [
    name for name, message in standalone_messages().items() if "type" in message.model_fields
]


@pytest.mark.parametrize("name", PEER_MESSAGES)
def test_peer_messages_are_distinguished_by_type(name):
    message = framing.peer_message.validate_json(read_golden(name))
    assert type(message) is standalone_messages()[name]


def test_golden_signatures_are_valid():
    """Ed25519 is deterministic: this fails if the bytes that a signature covers change."""
    signed = messages.Signed.model_validate_json(read_golden("signed"))
    update = messages.Update.model_validate_json(read_golden("update"))
    assert open_signed(signed, "update", messages.Update, AUTHOR.key) == update
    hello = messages.Hello.model_validate_json(read_golden("hello"))
    policy = TicketPolicy(hello.run, frozenset({MIRROR.key}))
    ticket = check_ticket(hello.ticket, AUTHOR.key, policy, 1_700_000_000.0)
    assert ticket == messages.Ticket.model_validate_json(read_golden("ticket"))


def test_signature_is_for_one_kind_and_one_text():
    signed = messages.Signed.model_validate_json(read_golden("signed"))
    with pytest.raises(MessageError, match="signature does not match"):
        open_signed(signed, "ticket", messages.Update)
    with pytest.raises(MessageError, match="signature does not match"):
        altered = signed.model_copy(update={"body": signed.body.replace("10240", "10241")})
        open_signed(altered, "update", messages.Update)
    with pytest.raises(MessageError, match="not by"):
        open_signed(signed, "update", messages.Update, MIRROR.key)


# ---- the site is out of the data path --------------------------------------------------------

FREE_TEXT = {
    "body",
    "spec",
    "name",
    "person",
    "error",
    "hostname",
    "system",
    "processor",
    "accelerator",
    "sentence",
    "text",
}
# Patterns that do not restrict what a text contains. Samples are short texts that a model wrote.
PRINTED = (r"^\P{C}*$", types_module.SAMPLE_PATTERN, types_module.DOCUMENT_PATTERN)
API_BYTES = 1_000_000  # no API message can be longer


def max_bytes(field_type: object, constraints: list[object], path: str) -> int:
    """Return the most bytes that a field can take as JSON.

    Fails for an unbounded field, and for text that could carry a payload.

    Args:
        field_type: The field's annotation.
        constraints: What further restricts it.
        path: The field's place in its message, separated by dots.
    """
    origin, arguments = typing.get_origin(field_type), typing.get_args(field_type)
    if origin is typing.Annotated:
        inner, *metadata = arguments
        return max_bytes(inner, [*constraints, *flatten_constraints(metadata)], path)
    if origin in (typing.Union, types.UnionType):
        return max(max_bytes(argument, constraints, path) for argument in arguments)
    if origin in (list, dict):
        limit = max_length(constraints)
        assert limit is not None, f"{path} is a {origin.__name__} without a bound"
        return 2 + limit * sum(1 + max_bytes(argument, [], path) for argument in arguments)
    if origin is tuple:
        return 2 + sum(1 + max_bytes(argument, [], path) for argument in arguments)
    if origin is typing.Literal:
        return max(len(str(argument)) for argument in arguments) + 2
    if isinstance(field_type, type) and issubclass(field_type, BaseModel):
        return 2 + sum(
            4 + len(name) + max_bytes(field.annotation, field.metadata, f"{path}.{name}")
            for name, field in field_type.model_fields.items()
        )
    if field_type is str:
        return max_text_bytes(constraints, path)
    is_enum = isinstance(field_type, type) and issubclass(field_type, StrEnum)
    assert is_enum or field_type in (int, float, bool, type(None)), (
        f"{path}: messages contain no {field_type}"
    )
    return 25


def flatten_constraints(metadata: list[object]) -> list[object]:
    """Return the metadata of an annotation with the contents of pydantic's fields."""
    constraints: list[object] = []
    for item in metadata:
        constraints += item.metadata if isinstance(item, FieldInfo) else [item]
    return constraints


def max_length(constraints: list[object]) -> int | None:
    lengths = [c.max_length for c in constraints if isinstance(c, annotated_types.MaxLen)]
    return lengths[0] if lengths else None


def max_text_bytes(constraints: list[object], path: str) -> int:
    """Return the most bytes of a text; fail if it is unbounded or could carry a payload."""
    limit = max_length(constraints)
    patterns = [getattr(constraint, "pattern", None) for constraint in constraints]
    is_restricted = any(pattern not in (*PRINTED, None) for pattern in patterns)
    assert is_restricted or (limit is not None and limit <= 130_000), (
        f"{path} is text without a bound"
    )
    field = path.rsplit(".", 1)[-1]
    assert is_restricted or field in FREE_TEXT or limit <= 100, f"{path} could carry a payload"
    return 2 + (limit or 200)


@pytest.mark.parametrize("message", API_MESSAGES, ids=lambda m: m.__name__)
def test_no_api_message_can_carry_weights_updates_or_text(message):
    """The types exclude it: no bytes, no unbounded field, texts are hex, names or signed documents.

    In total a message is shorter than a dense 8-bit update of the smallest model. A sparse update
    may be shorter than the longest spec; the types exclude it.
    """
    smallest = min(preset(name).parameters for name in PRESETS)  # one byte a parameter
    assert max_bytes(message, [], message.__name__) < min(API_BYTES, smallest)


def import_all_messages() -> set[type[types_module.Message]]:
    """Import every module that defines messages of a network; return all their types."""
    for module in pkgutil.iter_modules(protocol.__path__, "barnraise.protocol."):
        importlib.import_module(module.name)
    for name in ("eventlog.event", "replication.protocol", "telemetry.remote.protocol"):
        importlib.import_module(f"coordinator.{name}")
    found, waiting = set(), [types_module.Message]
    while waiting:
        more = set(waiting.pop().__subclasses__()) - found
        found |= more
        waiting += more
    return {t for t in found if t.__module__.startswith(("barnraise.protocol.", "coordinator."))}


def find_bare_text(field_type: object, constraints: list[object], path: str) -> list[str]:
    """Return the places of a field where any text is accepted, whatever characters it has."""
    arguments = typing.get_args(field_type)
    if typing.get_origin(field_type) is typing.Annotated:
        inner, *metadata = arguments
        return find_bare_text(inner, [*constraints, *flatten_constraints(metadata)], path)
    if field_type is str:
        has_pattern = any(getattr(constraint, "pattern", None) for constraint in constraints)
        is_cleaned = any(isinstance(constraint, AfterValidator) for constraint in constraints)
        return [] if has_pattern or is_cleaned else [path]
    if typing.get_origin(field_type) is typing.Literal or typing.Any in arguments:
        return []  # JSON of a mirror's log, which is read by types of its own
    return [bare for argument in arguments for bare in find_bare_text(argument, [], path)]


def test_unprintable_text_enters_no_message_model():
    """A bare `str` in a message reaches a terminal, a browser or a shell as a site spelled it."""
    bare = {
        place
        for message in import_all_messages()
        for name, field in message.model_fields.items()
        for place in find_bare_text(field.annotation, field.metadata, f"{message.__name__}.{name}")
    }
    assert len(import_all_messages()) > 60 and not bare, sorted(bare)


@pytest.mark.parametrize("name", PEER_MESSAGES)
def test_peer_messages_are_bounded(name):
    assert max_bytes(standalone_messages()[name], [], name) > 0


def test_text_larger_than_the_disk_of_anybody_is_in_no_manifest():
    manifest = json.loads(read_golden("text_manifest"))
    manifest["train"][0]["tokens"] = 10**15
    with pytest.raises(ValidationError, match="less than or equal to 268435456"):
        coordinator_messages.TextManifest.model_validate(manifest)


def test_report_is_small():
    """It includes the plan, the load and the reason of a pause, which every report contains."""
    assert len(json.dumps(json.loads(read_golden("reports"))["reports"], indent=1)) < 3_000


def test_report_without_a_plan_is_read():
    old = json.loads(read_golden("reports"))["reports"][0]
    del old["plan"], old["step_seconds"], old["checkpoint"], old["links"], old["system"]
    report = reports.Report.model_validate(old)
    assert report.plan is None and report.step_seconds is None and report.checkpoint is None


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 0},
        {"rate": float("inf")},
        {"vector": "x" * 64},
        {"points": [{"kind": "train", "tokens": 1, "loss": -1}]},
        {"step_seconds": -1.0},
        {"step_seconds": float("nan")},
        {"plan": {}},
        {"gradient_norm": float("inf")},
        {"system": {"cpu": 1.5}},
        {"system": {"cpu_celsius": 4000}},
        {"limits": {"memory": -1}},
        {"links": [{"peer": "x" * 16, "sent_rate": 0, "received_rate": 0}]},
        {"log": [{"at": 1, "level": "info", "text": "two\nlines"}]},
        {"log": [{"at": 1, "level": "info", "text": "x" * 161}]},
        {"log": [{"at": 1, "level": "info", "text": "line"}] * 6},
    ],
)
def test_invalid_field_in_a_report_is_refused(change):
    report = json.loads(read_golden("reports"))["reports"][0] | change
    with pytest.raises(ValidationError):
        reports.Report.model_validate(report)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "x" * 81},
        {"device": "GPU\0"},
        {"sentence": "all is well\N{RIGHT-TO-LEFT OVERRIDE}"},
        {"sentence": "x" * 301},
        {"disk_bytes": 1 << 63},
        {"host_bytes": -1},
        {"groups": 0},
        {"clipping": "some"},
        {"crash_safety": None},
        {"binding": "x" * 41},
        {"predicted_seconds": float("inf")},
    ],
)
def test_invalid_field_in_a_plan_is_refused(change):
    plan = json.loads(read_golden("reports"))["reports"][0]["plan"]
    assert reports.PlanView.model_validate(plan | {"device": "NVIDIA GeForce RTX 4090 – № 2"})
    with pytest.raises(ValidationError):
        reports.PlanView.model_validate(plan | change)
