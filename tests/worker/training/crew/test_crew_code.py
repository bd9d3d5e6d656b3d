"""A crew's code is one line that is read whole or refused, and its proof binds both keys."""

import base64
import uuid
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import CrewError
from barnraise.protocol.signing import Identity
from barnraise.training.crew.crew_code import MAX_CODE, CrewCode, parse_code

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
LEAD, MEMBER, OTHER = (Identity(bytes([number]) * 32).key for number in (1, 2, 3))
ADDRESSES = ("192.168.1.20:51820", "[2001:db8::1]:51820", "203.0.113.7:4433", "10.0.0.1:1")
CODE = CrewCode(RUN, LEAD, ADDRESSES[:2], bytes(range(16)))

addresses_strategy = st.lists(
    st.text(alphabet="0123456789abcdef.:[]", min_size=1, max_size=100), max_size=4
)


@given(run=st.uuids(), addresses=addresses_strategy, secret=st.binary(min_size=16, max_size=16))
def test_code_is_read_as_it_was_written(run, addresses, secret):
    code = CrewCode(str(run), LEAD, tuple(addresses), secret)
    text = str(code)
    assert parse_code(f"  {text}\n") == code
    assert len(text) <= MAX_CODE and text.isprintable() and " " not in text


@given(
    position=st.integers(0, 10_000), character=st.characters(min_codepoint=33, max_codepoint=126)
)
def test_code_with_one_other_character_is_refused(position, character):
    text = str(CODE)
    position %= len(text)
    if text[position] != character:
        with pytest.raises(CrewError):
            parse_code(text[:position] + character + text[position + 1 :])


@given(length=st.integers(0, 10_000))
def test_code_that_is_cut_or_prolonged_is_refused(length):
    text = str(CODE)
    with pytest.raises(CrewError):
        parse_code(text[: length % len(text)])
    with pytest.raises(CrewError):
        parse_code(text + "A" * (1 + length % 8))


@given(st.binary(max_size=300))
def test_any_bytes_with_a_right_checksum_are_read_or_refused(body):
    data = body + sha256(body).digest()[:4]
    text = "crew-" + base64.urlsafe_b64encode(data).decode().rstrip("=")
    try:
        assert str(parse_code(text)) == text
    except CrewError as error:
        assert "code" in str(error)


def test_refusals_say_what_to_do():
    with pytest.raises(CrewError, match="begins with 'crew-'"):
        parse_code("0192f0c1")
    with pytest.raises(CrewError, match="copy it again"):
        parse_code(str(CODE)[:-2])
    body = bytes([9, *uuid.UUID(RUN).bytes, *bytes.fromhex(LEAD), *bytes(16)])
    later = base64.urlsafe_b64encode(body + sha256(body).digest()[:4]).decode().rstrip("=")
    with pytest.raises(CrewError, match="version 9, and this program reads version 1"):
        parse_code("crew-" + later)


def test_proof_holds_for_one_machine_lead_run_and_secret():
    proof = CODE.prove(MEMBER)
    assert CODE.check_proof(MEMBER, proof)
    assert not CODE.check_proof(OTHER, proof)
    others = (
        CrewCode(RUN, OTHER, CODE.addresses, CODE.secret),
        CrewCode(RUN.replace("0192", "0193"), LEAD, CODE.addresses, CODE.secret),
        CrewCode(RUN, LEAD, CODE.addresses, bytes(16)),
    )
    assert not any(other.check_proof(MEMBER, proof) for other in others)
    assert not CODE.check_proof(MEMBER, "é" * 64)


def test_new_codes_have_other_secrets_and_few_addresses():
    codes = [CrewCode.create(RUN, LEAD, ADDRESSES * 2) for _ in range(2)]
    assert codes[0].secret != codes[1].secret and codes[0].addresses == ADDRESSES
    assert repr(codes[0].secret) not in repr(codes[0])
