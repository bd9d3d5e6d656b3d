"""Golden JSON that both sides must be able to read, and bounds that exclude weights and text."""

import json
import types
import typing
from enum import StrEnum
from pathlib import Path

import annotated_types
import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from barnraise.errors import MessageError
from barnraise.exchange.ledger import verdicts
from barnraise.exchange.network import framing
from barnraise.protocol import coordinator_messages, reports
from barnraise.protocol import messages as messages_module
from barnraise.protocol import types as types_module
from barnraise.protocol.signing import Identity, TicketPolicy, check_ticket, open_signed
from barnraise.spec import PRESETS, preset

GOLDEN = Path(__file__).parent / "golden"
AUTHOR, MIRROR = Identity(bytes(range(32))), Identity(bytes(range(32, 64)))


def messages() -> dict[str, type[types_module.Message]]:
    """Return every message type that can stand alone, by the name of its golden file."""
    inner = {
        reports.CheckpointView,
        messages_module.FragmentUpdate,
        reports.HardwareView,
        coordinator_messages.Shard,
        messages_module.Peer,
        reports.PlanView,
        reports.MeasuredLoss,
        reports.Report,
        coordinator_messages.RunSummary,
        coordinator_messages.SignedHeader,
        coordinator_messages.SignedStatement,
        reports.ExchangeView,
    }
    parts = {types_module.Message, *inner}
    modules = (messages_module, coordinator_messages, verdicts)
    named = [value for module in modules for value in vars(module).values()]
    found = [
        t
        for t in named
        if isinstance(t, type) and issubclass(t, types_module.Message) and t not in parts
    ]
    return {
        "".join("_" + c.lower() if c.isupper() else c for c in t.__name__).lstrip("_"): t
        for t in found
    }


def read_golden(name: str) -> str:
    return (GOLDEN / f"{name}.json").read_text()


def test_every_message_has_a_golden_file():
    assert {p.stem for p in GOLDEN.glob("*.json")} >= set(messages())


@pytest.mark.parametrize("name", messages())
def test_message_reads_its_golden_file_and_writes_it_again(name):
    message = messages()[name].model_validate_json(read_golden(name))
    assert json.loads(message.model_dump_json()) == json.loads(read_golden(name))


@pytest.mark.parametrize("name", messages())
def test_message_with_unknown_fields_is_read(name):
    more = json.loads(read_golden(name)) | {"from_the_future": {"anything": [1, 2]}}
    assert messages()[name].model_validate(more) == messages()[name].model_validate_json(
        read_golden(name)
    )


PEER_MESSAGES = [n for n, t in messages().items() if "type" in t.model_fields]


@pytest.mark.parametrize("name", PEER_MESSAGES)
def test_peer_messages_are_distinguished_by_type(name):
    assert type(framing.peer_message.validate_json(read_golden(name))) is messages()[name]


def test_golden_signatures_are_valid():
    """Ed25519 is deterministic: this fails if the bytes that a signature covers change."""
    signed = messages_module.Signed.model_validate_json(read_golden("signed"))
    assert open_signed(
        signed, "update", messages_module.Update, AUTHOR.key
    ) == messages_module.Update.model_validate_json(read_golden("update"))
    hello = messages_module.Hello.model_validate_json(read_golden("hello"))
    policy = TicketPolicy(hello.run, frozenset({MIRROR.key}))
    ticket = check_ticket(hello.ticket, AUTHOR.key, policy, 1_700_000_000.0)
    assert ticket == messages_module.Ticket.model_validate_json(read_golden("ticket"))


def test_signature_is_for_one_kind_and_one_text():
    signed = messages_module.Signed.model_validate_json(read_golden("signed"))
    with pytest.raises(MessageError, match="signature does not match"):
        open_signed(signed, "ticket", messages_module.Update)
    with pytest.raises(MessageError, match="signature does not match"):
        open_signed(
            signed.model_copy(update={"body": signed.body.replace("10240", "10241")}),
            "update",
            messages_module.Update,
        )
    with pytest.raises(MessageError, match="not by"):
        open_signed(signed, "update", messages_module.Update, MIRROR.key)


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
    "code",
    "url",
    "sentence",
}
PRINTED = r"^\P{C}*$"  # a pattern that does not restrict what a text contains
API_BYTES = 1_000_000  # no API message can be longer


def max_bytes(kind: object, constraints: list[object], path: str) -> int:
    """Return the most bytes that a field can take as JSON.

    Fails for an unbounded field, and for text that could carry a payload.
    """
    field = path.rsplit(".", 1)[-1]
    if typing.get_origin(kind) is typing.Annotated:
        inner, *more = typing.get_args(kind)
        flat = [c for m in more for c in (m.metadata if isinstance(m, FieldInfo) else [m])]
        return max_bytes(inner, [*constraints, *flat], path)
    limit = next((c.max_length for c in constraints if isinstance(c, annotated_types.MaxLen)), None)
    pattern = next(
        (p for c in constraints if (p := getattr(c, "pattern", PRINTED)) not in (PRINTED, None)),
        None,
    )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return max(max_bytes(a, constraints, path) for a in arguments)
    if origin is list:
        assert limit is not None, f"{path} is a list without a bound"
        return 2 + limit * (1 + max_bytes(arguments[0], [], path))
    if origin is dict:
        assert limit is not None, f"{path} is a dict without a bound"
        return 2 + limit * (
            2 + max_bytes(arguments[0], [], path) + max_bytes(arguments[1], [], path)
        )
    if origin is tuple:
        return 2 + sum(1 + max_bytes(each, [], path) for each in arguments)
    if origin is typing.Literal:
        return max(len(str(a)) for a in arguments) + 2
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return 2 + sum(
            4 + len(n) + max_bytes(f.annotation, f.metadata, f"{path}.{n}")
            for n, f in kind.model_fields.items()
        )
    if kind is str:
        assert pattern or (limit is not None and limit <= 130_000), (
            f"{path} is text without a bound"
        )
        assert pattern or field in FREE_TEXT or limit <= 100, f"{path} could carry a payload"
        return 2 + (limit or 200)
    if kind in (int, float, bool, type(None)) or (
        isinstance(kind, type) and issubclass(kind, StrEnum)
    ):
        return 25
    raise AssertionError(f"{path}: a {kind} has no place on the wire")


@pytest.mark.parametrize("message", coordinator_messages.API_MESSAGES, ids=lambda m: m.__name__)
def test_no_api_message_can_carry_weights_updates_or_text(message):
    """The types exclude it: no bytes, no unbounded field, texts are hex, names or signed documents.

    In total a message is shorter than a dense 8-bit update of the smallest model. A sparse update
    may be shorter than the longest spec; the types exclude it.
    """
    smallest = min(preset(name).parameters for name in PRESETS)  # one byte a parameter
    assert max_bytes(message, [], message.__name__) < min(API_BYTES, smallest)


@pytest.mark.parametrize("name", PEER_MESSAGES)
def test_peer_messages_are_bounded(name):
    assert max_bytes(messages()[name], [], name) > 0


def test_report_is_small():
    """It includes the plan, which every report contains."""
    assert len(json.dumps(json.loads(read_golden("reports"))["reports"], indent=1)) < 2_000


def test_report_without_a_plan_is_read():
    old = json.loads(read_golden("reports"))["reports"][0]
    del old["plan"], old["step_seconds"], old["checkpoint"]
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
