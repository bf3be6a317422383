"""Guard of the web page: token, cookie, Host header, method, and the headers of every answer."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN = "token"
"""Name of the token in the URL."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),  # the first address has the token in it
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_LOCAL = ("127.0.0.1", "localhost", "::1")
_ENTERED = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>penstock ui</title><link rel="icon" href="data:,">'
    '<meta http-equiv="refresh" content="0;url={path}"><p><a href="{path}">Open the page</a></p></html>'
)


@dataclass(frozen=True, slots=True)
class Access:
    """Secrets of one server, and the address it listens on."""

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Value of the cookie: the token itself stays out of the browser's store."""

    @property
    def cookie(self) -> str:
        """Name of the cookie. Browsers keep cookies by host alone, so the port is part of it."""
        return f"penstock_ui_{self.port}"

    @property
    def address(self) -> str:
        """Address to open, with the token."""
        return f"{self.origin}/?{TOKEN}={self.token}"

    @property
    def origin(self) -> str:
        host = self.host if self.host not in ("0.0.0.0", "::") else socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def knows_host(self, header: str) -> bool:
        """True for a Host header that names this server.

        A page of somebody else whose name resolves to this machine (DNS rebinding) sends its own name. Addresses in
        digits cannot be rebound, so a server that listens on all of them takes any.
        """
        name, port = _split_host(header)
        if port != self.port:
            return False
        if name in _LOCAL or name == self.host.lower():
            return True
        if self.is_loopback():
            return False
        return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())


class Guard:
    """ASGI application around another one, which lets only GET and HEAD with the token through."""

    def __init__(self, app: Application, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket: the server closes it
        headers = {name.lower(): value for name, value in scope["headers"]}
        if not self._access.knows_host(headers.get(b"host", b"").decode("latin-1")):
            await _answer(send, 421, "This address is not that of penstock ui. Open the one that the command printed.")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, "Only GET: this page changes nothing.", [(b"allow", b"GET, HEAD")])
        elif self._shows_token(scope):
            await self._enter(scope, send)
        elif not self._shows_cookie(headers.get(b"cookie", b"").decode("latin-1")):
            await _answer(send, 403, "No access. Open the address that `penstock ui` printed, with its token.")
        else:
            await self._app(scope, receive, _with_headers(send))

    def _shows_token(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get(TOKEN, [])
        return len(given) == 1 and _same(given[0], self._access.token)

    def _shows_cookie(self, header: str) -> bool:
        try:
            morsel = SimpleCookie(header).get(self._access.cookie)
        except CookieError:
            return False
        return morsel is not None and _same(morsel.value, self._access.session)

    async def _enter(self, scope: Scope, send: Send) -> None:
        """Exchange the token for the cookie.

        With a page and not with a redirect: a browser sends no SameSite=Strict cookie with a redirect that began on
        another site, such as a terminal in a web page.
        """
        access = self._access
        cookie = f"{access.cookie}={access.session}; HttpOnly; SameSite=Strict; Path=/"
        path = "/" if scope["path"].startswith("//") else _quoted(scope["path"])
        await _answer(send, 200, _ENTERED.format(path=path), [(b"set-cookie", cookie.encode())], kind=b"text/html")


def is_loopback(host: str) -> bool:
    """True for a name or address of this machine alone."""
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _split_host(header: str) -> tuple[str, int]:
    """Name and port of a Host header; port -1 if it is no port."""
    name, colon, port = header.strip().lower().rpartition(":")
    if not colon or header.endswith("]"):
        name, port = header.strip().lower(), "80"
    return name.removeprefix("[").removesuffix("]"), int(port) if port.isascii() and port.isdecimal() else -1


def _same(given: str, wanted: str) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


def _quoted(path: str) -> str:
    return quote(path, safe="/")


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending


async def _answer(
    send: Send, status: int, text: str, more: list[tuple[bytes, bytes]] | None = None, *, kind: bytes = b"text/plain"
) -> None:
    body = text.encode()
    headers = [(b"content-type", kind + b"; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    start = {"type": "http.response.start", "status": status, "headers": [*headers, *(more or ())]}
    await _with_headers(send)(start)
    await send({"type": "http.response.body", "body": body})
