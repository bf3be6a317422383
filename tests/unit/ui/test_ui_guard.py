from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ui_cases import client, write_lines

from penstock.ui.guard import POLICY, Access

PATHS = ["/", "/live", "/t/0", "/t/0/row/0-0-0", "/t/0/live", "/assets/ui.js", "/assets/page.css", "/nothing"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", [{"text": "one"}])


@pytest.mark.parametrize("path", PATHS)
def test_every_route_needs_the_token(target: Path, path: str) -> None:
    stranger = client(target, let_in=False)
    assert stranger.get(path).status_code == 403
    assert stranger.get(path, params={"token": "guess"}).status_code == 403
    assert stranger.get(path, params={"token": ["a", stranger.access.token]}).status_code == 403
    assert (
        stranger.get(path, headers={"cookie": f"{stranger.access.cookie}={stranger.access.token}"}).status_code == 403
    )


def test_the_token_is_exchanged_for_a_cookie_that_scripts_and_other_sites_do_not_get(target: Path) -> None:
    made = client(target, let_in=False)
    answer = made.get("/t/0", params={"token": made.access.token})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("penstock_ui_8710=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert made.access.token not in cookie
    assert made.access.token not in answer.text
    assert 'url=/t/0"' in answer.text
    assert made.get("/t/0").status_code == 200


def test_the_way_in_leads_to_no_other_site(target: Path) -> None:
    made = client(target, let_in=False)
    answer = made.get("http://127.0.0.1:8710//evil.example/%22%3E", params={"token": made.access.token})
    assert 'url=/"' in answer.text
    assert "evil" not in answer.text


@pytest.mark.parametrize(
    "host", ["evil.example:8710", "127.0.0.1:80", "127.0.0.1", "localhost.evil.example:8710", "", "a:b"]
)
def test_a_host_that_is_not_ours_is_refused_even_with_the_cookie(target: Path, host: str) -> None:
    made = client(target)
    assert made.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8710", "localhost:8710", "LOCALHOST:8710", "[::1]:8710"])
def test_the_names_of_this_machine_are_known(host: str) -> None:
    assert Access("127.0.0.1", 8710).knows_host(host)


def test_a_server_on_all_addresses_takes_addresses_but_no_foreign_names() -> None:
    access = Access("0.0.0.0", 8710)
    assert access.knows_host("10.1.2.3:8710")
    assert not access.knows_host("evil.example:8710")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_get_and_head(target: Path, method: str) -> None:
    made = client(target)
    assert made.request(method, "/").status_code == 405
    assert made.head("/").status_code == 200


@pytest.mark.parametrize("path", [*PATHS, "/t/9"])
def test_every_answer_has_the_policy_and_is_not_kept(target: Path, path: str) -> None:
    for made in (client(target), client(target, let_in=False)):
        headers: Any = made.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
    assert "unsafe" not in POLICY


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../guard.py",
        "/assets/%2e%2e%2fguard.py",
        "/assets/ui.py",
        "/t/0/row/..%2f..%2fetc%2fpasswd",
        "/t/0?at=/etc/passwd",
        "/t/0?at=7-0-0",
        "/t/0?file=99",
        "/t/1",
        "/t/-1",
        "/etc/passwd",
    ],
)
def test_no_address_leads_out_of_the_targets(target: Path, path: str) -> None:
    answer = client(target).get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text


def test_pages_have_no_script_and_no_style_in_them(target: Path) -> None:
    made = client(target)
    for path in ("/", "/t/0", "/t/0/row/0-0-0"):
        text = made.get(path).text
        assert text.count("<script") == text.count('<script src="/assets/') == 2
        assert "<style" not in text
        assert " style=" not in text
        assert " onclick" not in text
