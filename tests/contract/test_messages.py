"""The messages on the wire: golden JSON that both sides must go on reading, and bounds that keep weights out of it."""

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
from barnraise.protocol.signing import Identity, check_ticket, open_signed
from barnraise.spec import PRESETS, preset

GOLDEN = Path(__file__).parent / "golden"
AUTHOR, MIRROR = Identity(bytes(range(32))), Identity(bytes(range(32, 64)))


def messages() -> dict[str, type[types_module.Message]]:
    """Every message type that can stand alone, by the name of its golden file."""
    inner = {
        reports.CheckpointView,
        messages_module.FragmentUpdate,
        reports.HardwareView,
        coordinator_messages.Shard,
        messages_module.Peer,
        reports.PlanView,
        reports.LossPoint,
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


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.json").read_text()


def test_every_message_has_a_golden_file_and_every_file_a_message():
    assert {p.stem for p in GOLDEN.glob("*.json")} >= set(messages())


@pytest.mark.parametrize("name", messages())
def test_a_message_reads_its_golden_file_and_writes_it_again(name):
    message = messages()[name].model_validate_json(golden(name))
    assert json.loads(message.model_dump_json()) == json.loads(golden(name))


@pytest.mark.parametrize("name", messages())
def test_a_newer_peer_may_say_more(name):
    more = json.loads(golden(name)) | {"from_the_future": {"anything": [1, 2]}}
    assert messages()[name].model_validate(more) == messages()[name].model_validate_json(
        golden(name)
    )


PEER_MESSAGES = [n for n, t in messages().items() if "type" in t.model_fields]


@pytest.mark.parametrize("name", PEER_MESSAGES)
def test_peers_tell_their_messages_apart_by_type(name):
    assert type(framing.peer_message.validate_json(golden(name))) is messages()[name]


def test_golden_signatures_hold():
    """Ed25519 is deterministic: if what a signature covers ever changes, these fail."""
    signed = messages_module.Signed.model_validate_json(golden("signed"))
    assert open_signed(
        signed, "update", messages_module.Update, AUTHOR.key
    ) == messages_module.Update.model_validate_json(golden("update"))
    hello = messages_module.Hello.model_validate_json(golden("hello"))
    ticket = check_ticket(
        hello.ticket,
        run=hello.run,
        peer=AUTHOR.key,
        mirrors=frozenset({MIRROR.key}),
        revoked=frozenset(),
        now=1_700_000_000.0,
        orphaned=False,
    )
    assert ticket == messages_module.Ticket.model_validate_json(golden("ticket"))


def test_a_signature_is_for_one_kind_and_one_text():
    signed = messages_module.Signed.model_validate_json(golden("signed"))
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


# ---- the site is out of the data path ----------------------------------------------------------------------------

FREE_TEXT = {
    "body", "spec", "name", "person", "error", "hostname", "system", "processor", "accelerator", "code", "url",
    "sentence",
}  # fmt: skip
PRINTED = r"^\P{C}*$"  # a pattern that says nothing about what a text carries
API_BYTES = 1_000_000  # no message of the API can be longer, however it is filled


def longest(kind: object, constraints: list[object], path: str) -> int:
    """The most bytes a field can take as JSON. Fails for anything unbounded, and for text that could carry payloads."""
    field = path.rsplit(".", 1)[-1]
    if typing.get_origin(kind) is typing.Annotated:
        inner, *more = typing.get_args(kind)
        flat = [c for m in more for c in (m.metadata if isinstance(m, FieldInfo) else [m])]
        return longest(inner, [*constraints, *flat], path)
    limit = next((c.max_length for c in constraints if isinstance(c, annotated_types.MaxLen)), None)
    pattern = next(
        (p for c in constraints if (p := getattr(c, "pattern", PRINTED)) not in (PRINTED, None)),
        None,
    )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return max(longest(a, constraints, path) for a in arguments)
    if origin is list:
        assert limit is not None, f"{path} is a list without a bound"
        return 2 + limit * (1 + longest(arguments[0], [], path))
    if origin is dict:
        assert limit is not None, f"{path} is a dict without a bound"
        return 2 + limit * (2 + longest(arguments[0], [], path) + longest(arguments[1], [], path))
    if origin is tuple:
        return 2 + sum(1 + longest(each, [], path) for each in arguments)
    if origin is typing.Literal:
        return max(len(str(a)) for a in arguments) + 2
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return 2 + sum(
            4 + len(n) + longest(f.annotation, f.metadata, f"{path}.{n}")
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
def test_no_message_of_the_api_can_carry_weights_updates_or_text(message):
    """By its types: no bytes, nothing unbounded, texts that are hex, names or what was signed, and all told less than
    one dense 8-bit update of the smallest model. (A thin one is shorter than the longest spec: types keep it out.)"""
    smallest = min(preset(name).parameters for name in PRESETS)  # one byte a parameter
    assert longest(message, [], message.__name__) < min(API_BYTES, smallest)


@pytest.mark.parametrize("name", PEER_MESSAGES)
def test_peers_headers_are_bounded_too(name):
    assert longest(messages()[name], [], name) > 0


def test_a_report_is_small():
    """Its plan included: every one carries it, so that no lost report and no site that forgot leaves a machine bare."""
    assert len(json.dumps(json.loads(golden("reports"))["reports"], indent=1)) < 2_000


def test_a_worker_without_a_plan_is_read_too():
    old = json.loads(golden("reports"))["reports"][0]
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
def test_nonsense_in_a_report_is_refused(change):
    report = json.loads(golden("reports"))["reports"][0] | change
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
def test_nonsense_in_a_plan_is_refused(change):
    plan = json.loads(golden("reports"))["reports"][0]["plan"]
    assert reports.PlanView.model_validate(plan | {"device": "NVIDIA GeForce RTX 4090 – № 2"})
    with pytest.raises(ValidationError):
        reports.PlanView.model_validate(plan | change)
