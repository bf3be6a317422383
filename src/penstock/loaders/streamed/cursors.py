"""Where a stream stands, as a few numbers, and these as a few characters: a state holds one for each of 128 streams."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from penstock.errors import ResumeError

__all__ = ["Start", "StreamCursor"]

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_MORE = 32
_ENDED = "."


@dataclass(frozen=True, slots=True)
class Start:
    """Where a window begins: which of the stream's blocks, how far into it, and how many windows came before."""

    block: int = 0
    at: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """The next sample of a stream: number `index` of the window `ahead` behind the one that begins at `start`.

    The windows between hold the last `carry` tokens before it, which its first samples begin with; without any there
    are none.
    """

    start: Start = Start()
    ahead: int = 0
    carry: int = 0
    index: int = 0
    ended: bool = False

    def to_text(self) -> str:
        """Numbers in digits of five bits, the lowest first, with a sixth that says whether more follow."""
        if self.ended:
            return _ENDED
        return "".join(map(_spelled, (*astuple(self.start), self.ahead, self.carry, self.index)))

    @classmethod
    def from_text(cls, text: str) -> StreamCursor:
        if text == _ENDED:
            return cls(ended=True)
        numbers, number, shift = [], 0, 0
        try:
            for digit in text:
                value = _VALUES[digit]
                number |= (value & (_MORE - 1)) << shift
                shift += 5
                if not value & _MORE:
                    numbers.append(number)
                    number = shift = 0
            block, at, window, ahead, carry, index = numbers
        except (KeyError, TypeError, ValueError):
            raise ResumeError(f"the state is damaged: {text!r} is not the cursor of a stream") from None
        return cls(Start(block, at, window), ahead, carry, index)


def _spelled(number: int) -> str:
    digits = []
    while True:
        number, low = number >> 5, number & (_MORE - 1)
        digits.append(_DIGITS[low | (_MORE if number else 0)])
        if not number:
            return "".join(digits)
