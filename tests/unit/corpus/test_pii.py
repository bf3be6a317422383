"""What is scrubbed and what is left alone, by example and by making up more."""

from __future__ import annotations

import ipaddress
import json
import random
import string
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.corpus import pii as scrubbing
from penstock.corpus.pii import ScrubPII
from penstock.errors import SchemaError

RANDOM = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hI6"
MARK, END = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
LINES = "\n".join("MIIEowIBAAKCAQEA1c7+9z5Pad7OejecsQ0buwxLZAkGeQ1WSeTBc0Fv4rGfF2N/"[i:] for i in range(5))


def scrubbed(text: str, **options: Any) -> str:
    (out,) = ScrubPII(**options).transform(pa.record_batch({"text": [text]}))["text"].to_pylist()
    return str(out)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to jo.doe+x@mail.example.co.uk.", "Write to <EMAIL>."),
        ("<jörg@müller.de>, A_B@C.IO!", "<<EMAIL>>, <EMAIL>!"),
        ("a@b.com c@d.org", "<EMAIL> <EMAIL>"),
        ("server 8.8.8.8, 93.184.216.34:80 and 1.1.1.1", "server <IP>, <IP>:80 and <IP>"),
        ("8.8.8.8 8.8.4.4", "<IP> <IP>"),
        ("at 2001:4860:4860::8888.", "at <IP>."),
        ("at 2606:4700:4700:0:0:0:0:1111 now", "at <IP> now"),
        ("+49 30 1234567 or +14155550123", "<PHONE> or <PHONE>"),
        ("Call (212) 555-0199, 212-555-0199 or 415.555.2671.", "Call <PHONE>, <PHONE> or <PHONE>."),
        ("+1 (415) 555-2671", "<PHONE>"),
        ("+44 20 7946 0958", "<PHONE>"),
        ("id AKIAIOSFODNN7EXAMPLE;", "id <KEY>;"),
        ("token ghp_" + "a1B2" * 9, "token <KEY>"),
        ("github_pat_" + "11AAAAAAA0" * 3, "<KEY>"),
        ("OPENAI=sk-proj-abcdEFGHijklMNOPqrst12", "OPENAI=<KEY>"),
        ("xoxb-123456789012-abcdefGHIJ", "<KEY>"),
        ("AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q"[:35], "<KEY>"),
        ("hf_" + "abCD" * 9, "<KEY>"),
        ("sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc", "<KEY>"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4", "<KEY>"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nx==\n-----END RSA PRIVATE KEY-----\nb", "a\n<KEY>\nb"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl", "<KEY>"),
        (f"secret: {RANDOM}", "secret: <KEY>"),
        (f"KEY={RANDOM}", "KEY=<KEY>"),
        (f"https://a.example/?user=1&token={RANDOM}&x=2", "https://a.example/?user=1&token=<KEY>&x=2"),
        (
            f'The key is {RANDOM}. Keep it, or {RANDOM}==, or "{RANDOM}".',
            'The key is <KEY>. Keep it, or <KEY>, or "<KEY>".',
        ),
        (f"密钥{RANDOM}和sk-proj-abcdEFGHijklMNOPqrst12。", "密钥<KEY>和<KEY>。"),
        ("sk-ant-api03-" + RANDOM + "-" + RANDOM + "AA", "<KEY>"),
        ("sk-or-v1-" + "0123456789abcdef" * 4, "<KEY>"),
        ("eyJhbGciOiJI.eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4", "<KEY>.SflKxwRJSMeKKF2QT4"),
        (f"a\n{MARK}\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,{'0A' * 16}\n\n{LINES}\n{END}\nb", "a\n<KEY>\nb"),
        (f'{{"key": "{MARK}\\n{RANDOM}{RANDOM}\\nx==\\n{END}\\n"}}', '{"key": "<KEY>\\n"}'),
        (f"{MARK} {LINES} {END}".replace("\n", " "), "<KEY>"),
        (f"a {MARK}\n{LINES}\nand what comes after it stays.", "a <KEY>\nand what comes after it stays."),
        (f"Begins so: {MARK}. And then:\n{MARK}\n{LINES}\n{END}", f"Begins so: {MARK}. And then:\n<KEY>"),
        ("+7 495 123 4567", "<PHONE>"),
        ("+33 1 23 45 67 89, +61 2 9374 4000; +7 495 123-45-67", "<PHONE>, <PHONE>; <PHONE>"),
        ("+33\u00a01\u202f23 45 67 89", "<PHONE>"),
        ("+44 (0)20 7946 0958 / +49 (30) 123456-78", "<PHONE> / <PHONE>"),
        ("+39 06 698 12345, +4420 7946 0958, +354 555 1234", "<PHONE>, <PHONE>, <PHONE>"),
        ("+1 415 555 2671 2024 was the year, +1.415.555.2671", "<PHONE> 2024 was the year, <PHONE>"),
        ("(212)555-0199 and 1-212-555-0199", "<PHONE> and <PHONE>"),
    ],
)
def test_personal_data_and_secrets_are_replaced(text: str, expected: str) -> None:
    assert scrubbed(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "no@tld, @handle, a@b, x@y.z, user@host.c1, price @ 5.00",
        "10.0.0.1 192.168.1.1 127.0.0.1 172.16.3.4 169.254.0.1 203.0.113.9",
        "version 1.2.3, v1.2.3.4, 1.2.3.4.5, 999.8.8.8, 256.1.1.1, 8.8.8, 08.8.8.8x",
        "12:30:45, std::vector, a::b, 00:1A:2B:3C:4D:5E, fe80::1, ::1, Foo::Bar::Baz",
        "order 1234567890 on 2024-10-12, 555-1234, ISBN 978-3-16-148410-0, 123-45-6789, +50000 points, 1 000 000 000",
        "212-555-01999, 2212-555-0199, 112-555-0199",
        "d670460b4b4aece5915caf5c68d12f560a9fe3e4",
        "550e8400-e29b-41d4-a716-446655440000",
        "thisIsAVeryLongCamelCaseIdentifierNameInSomeLanguage2",
        "https://example.com/a/very/long/path/with/many/parts/and/more/parts/of/it",
        "AKIASHORT, ghp_short, sk-learn, hf_hub, task-force-and-risk-management",
        "-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----",
        "",
        f"A key file begins with {MARK} and goes on. The rest of this page has nothing to hide.",
        f"It begins with {MARK}\nHome\nAbout\nContact us",
        f"From {MARK} on, all that you read up to {END} is no key but a sentence about keys.",
        "lat +52.5200066 lon +13.4049540, +1.4142135623, +3.14159265358",
        "+10 2024-10-12, +1 2024-10-12, +7 2024-10-12 11:30, +50000000 points, +12345678, +20 000 000, +10000000000",
        ".sk-estimator-doc-link-label, sk-learn-contrib-project-template, sk-container-id-12345-text-repr-fallback",
        "ThisIsAVeryLongCamelCaseIdentifierName123WithDigits456",
        "x=AbstractSingletonProxyFactoryBean2024Version17Final; GetHTTPResponseCode404FromServer500AndRetry3Times",
        "utm_campaign=Some-Long-Campaign-Name-For-2024-And-The-Spring-Of-2025",
        "00:1a:2b:ff:fe:3c:4d:70, 20:01:0D:B8:85:A3:08:D3",
    ],
)
def test_what_only_looks_alike_is_left_alone(text: str) -> None:
    assert scrubbed(text) == text


def test_private_addresses_go_too_when_asked() -> None:
    assert scrubbed("10.0.0.1 fe80:0:0::1 1.2.3", public_ips_only=False) == "<IP> <IP> 1.2.3"


@given(st.ip_addresses().filter(lambda address: not getattr(address, "ipv4_mapped", None)))
@settings(max_examples=150, deadline=None)
def test_an_address_goes_exactly_if_it_is_global(address: Any) -> None:
    groups = [group for group in str(address).split(":") if group]
    sparse = address.version == 6 and len(groups) < 3
    expected = "<IP>" if ipaddress.ip_address(str(address)).is_global and not sparse else str(address)
    assert scrubbed(f"({address}) ", kinds=["ip"]) == f"({expected}) "


def test_the_address_inside_a_mapped_one_decides() -> None:
    assert "8.8.8.8" not in scrubbed("at ::ffff:8.8.8.8 and", kinds=["ip"])
    assert scrubbed("at ::ffff:10.0.0.1 and", kinds=["ip"]) == "at ::ffff:10.0.0.1 and"


words = st.text(string.ascii_lowercase, min_size=1, max_size=8)


@given(
    st.lists(words, min_size=1, max_size=3), st.lists(words, min_size=1, max_size=3), st.sampled_from(["com", "org"])
)
@settings(max_examples=100, deadline=None)
def test_any_plain_mail_address_goes(local: list[str], host: list[str], ending: str) -> None:
    address = f"{'.'.join(local)}@{'.'.join(host)}.{ending}"
    assert scrubbed(f"to {address}, and {address}.") == "to <EMAIL>, and <EMAIL>."


def test_rows_are_counted_once_for_each_kind_and_null_stays_null() -> None:
    batch = pa.record_batch(
        {"text": ["x", "a@b.com c@d.com 8.8.8.8", None, "e@f.com", ""], "note": ["g@h.com", "i@j.com", "", None, "k"]}
    )[1:]
    stage = ScrubPII(["text", "note"])
    out = stage.transform(batch)
    assert out.to_pydict() == {
        "text": ["<EMAIL> <EMAIL> <IP>", None, "<EMAIL>", ""],
        "note": ["<EMAIL>", "", None, "k"],
    }
    assert stage.counts == {"pii: email": 2, "pii: ip": 1}
    stage.reset()
    assert stage.counts == {}


@pytest.mark.parametrize("dtype", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_the_type_of_the_column_stays(dtype: pa.DataType) -> None:
    batch = pa.record_batch({"text": pa.array(["a@b.com", None, "x\x00y"]).cast(dtype)})
    out = ScrubPII().transform(batch)
    assert out.schema == batch.schema
    assert out["text"].to_pylist() == ["<EMAIL>", None, "x\x00y"]


def test_replacements_and_kinds_can_be_chosen() -> None:
    text = r"a@b.com 8.8.8.8 \1"
    assert scrubbed(text, kinds=["email"], replacements={"email": r"\1 [mail]"}) == r"\1 [mail] 8.8.8.8 \1"
    assert scrubbed(RANDOM, min_entropy=None) == RANDOM


def test_nearly_every_key_made_at_random_is_found() -> None:
    rng = random.Random(5)
    for letters in (string.ascii_letters + string.digits, string.ascii_letters + string.digits + "-_"):
        for length, share in ((40, 0.9), (64, 0.98)):
            keys = ["".join(rng.choices(letters, k=length)) for _ in range(2000)]
            found = ScrubPII(kinds=["key"]).transform(pa.record_batch({"text": [f"x={key}." for key in keys]}))
            assert found["text"].to_pylist().count("x=<KEY>.") >= share * len(keys)


pieces = st.lists(
    st.sampled_from([
        "+", "1", "7", "33", "495", "(", ")", " ", "-", ".", "2", "555", "4567", ":", "::", "2001", "a", "fe80", "@",
        "b.com", "eyJhbGciOiJI", "sk-", "AKIAIOSFODNN7EXAMPLE", RANDOM, "\u0661", "\u0664\u0669", "\u00a0", "8.8.8.8",
        "ghp_" + "a1B2" * 9, MARK, END, "\n", "xoxb-", "_", "é", "漢",
    ]),
    max_size=14,
).map("".join)  # fmt: skip


@given(pieces)
@settings(max_examples=400, deadline=None)
def test_every_row_with_a_find_has_the_hint(text: str) -> None:
    for finder in scrubbing._finders(False, 3.0):
        if any(finder.wanted(found[0]) for found in finder.pattern.finditer(text)):
            assert pc.match_substring_regex(pa.array([text]), pattern=finder.hint)[0].as_py(), (finder, text)


@given(pieces, pieces)
@settings(max_examples=150, deadline=None)
def test_a_row_is_scrubbed_as_it_would_be_alone(one: str, other: str) -> None:
    both = ScrubPII().transform(pa.record_batch({"text": [one, other]}))["text"].to_pylist()
    assert both == [scrubbed(one), scrubbed(other)]


HOSTILE = [
    "eyJ-", "eyJhbGciOiJI.", "eyJ", "sk-", "sk-a1", "sk-proj-", "xoxb-", "github_pat_", "ghp_" + "a" * 40, "hf_",
    "AIza", "sk_live_", "AKIA", MARK, MARK + "\n", MARK + " a ", MARK + LINES, "-----", "- ", END, "a@", "a.", "a@a.",
    "@", "+1 ", "+1", "+33 1 ", "+7(", "1-", "(212)", "212-555-", "1.", "8.8.", ":1", "a:", "::", "1:2::", "aB3",
    "aB3_", "a=", "=", RANDOM + "/",
]  # fmt: skip


def test_hostile_rows_do_not_take_the_square_of_their_length() -> None:
    script = (
        "import sys, json, pyarrow as pa\n"
        "from penstock.corpus.pii import ScrubPII\n"
        "for piece in json.load(sys.stdin):\n"
        "    ScrubPII().transform(pa.record_batch({'text': [piece * (400_000 // len(piece))]}))\n"
    )
    # Seconds if it is linear; many minutes if any of them is not.
    subprocess.run([sys.executable, "-c", script], input=json.dumps(HOSTILE), text=True, timeout=100, check=True)


def test_a_huge_row_without_anything_is_passed_on() -> None:
    text = "a" * 3_000_000
    assert scrubbed(text) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["mail"]}, "'mail'"),
        ({"kinds": []}, r"\bkinds\b"),
        ({"replacements": {"ssn": "x"}}, "'ssn'"),
    ],
)
def test_unknown_kinds_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScrubPII(**options)


def test_a_column_of_numbers_is_refused() -> None:
    with pytest.raises(SchemaError, match="'n'"):
        ScrubPII("n").transform(pa.record_batch({"n": [1]}))


def test_the_fingerprint_follows_the_options() -> None:
    made = [ScrubPII(), ScrubPII("b"), ScrubPII(kinds=["ip"]), ScrubPII(min_entropy=5), ScrubPII(public_ips_only=False)]
    assert len({stage.fingerprint for stage in made}) == len(made)
    assert ScrubPII().fingerprint == ScrubPII(kinds=["phone", "ip", "email", "key"]).fingerprint
