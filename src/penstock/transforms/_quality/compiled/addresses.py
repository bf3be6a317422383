"""Web and mail addresses, which words are not cut in: see `english.ADDRESS`."""

# ruff: noqa: SIM300
from __future__ import annotations

from penstock.transforms._quality.compiled.points import Array, compiled, is_digit

__all__ = ["is_address"]


@compiled
def is_address(data: Array, start: int, stop: int) -> bool:
    """A web or mail address: see `english.ADDRESS`."""
    if is_host(data, start, stop):
        return True
    scheme = True
    for at in range(start, stop):
        byte = data[at]
        if scheme and byte == 58 and at - start >= 2 and at + 2 < stop and data[at + 1] == 47 and data[at + 2] == 47:
            if is_host(data, at + 3, stop):
                return True
            scheme = False
        scheme = scheme and (is_host_byte(byte) or byte == 43) and byte < 0x80
        if byte == 64 and at > start and is_host(data, at + 1, stop):
            return True
    return False


@compiled
def is_host_byte(byte: int) -> bool:
    letter = 97 <= (byte | 32) and (byte | 32) <= 122
    return letter or is_digit(byte) or byte == 46 or byte == 45 or byte == 95 or byte >= 0x80


@compiled
def is_host(data: Array, start: int, stop: int) -> bool:
    """A host name or an IPv4 address, then perhaps a port and a path."""
    at = start
    while at < stop and is_host_byte(data[at]):
        at += 1
    if not (is_name(data, start, at) or is_dotted_quad(data, start, at)):
        return False
    if at < stop and data[at] == 58:
        port = at + 1
        while port < stop and is_digit(data[port]):
            port += 1
        if port - at - 1 < 2 or port - at - 1 > 5:
            return False
        at = port
    return at == stop or data[at] == 47 or data[at] == 63 or data[at] == 35


@compiled
def is_name(data: Array, start: int, stop: int) -> bool:
    label, labels, characters, lower = start, 0, 0, True
    for at in range(start, stop):
        byte = data[at]
        if byte == 46:
            if at == label or characters > 64 or is_joint(data[label]) or is_joint(data[at - 1]):
                return False
            label, labels, characters, lower = at + 1, labels + 1, 0, True
        else:
            characters += (byte & 0xC0) != 0x80
            lower = lower and ((97 <= byte and byte <= 122) or byte >= 0x80)
    return labels > 0 and lower and characters >= 2 and characters <= 63


@compiled
def is_joint(byte: int) -> bool:
    return byte == 45 or byte == 95


@compiled
def is_dotted_quad(data: Array, start: int, stop: int) -> bool:
    digits, dots = 0, 0
    for at in range(start, stop):
        if data[at] == 46:
            if digits == 0:
                return False
            digits, dots = 0, dots + 1
        elif is_digit(data[at]):
            digits += 1
            if digits > 3:
                return False
        else:
            return False
    return dots == 3 and digits > 0
