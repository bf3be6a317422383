"""Models of Google's SentencePiece: the serialised model is all there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import xxhash

from penstock.errors import ConfigError
from penstock.transforms._tokenizers.base import SpecialTokens
from penstock.transforms._tokenizers.ragged import Ints
from penstock.transforms._tokenizers.reference import FastModel, Offsets, TokenTable, literal
from penstock.transforms._tokenizers.segments import encode_segments

__all__ = ["SentencePieceReference"]


# Whitespace that is no space to SentencePiece.
SPACES = r"\t\n\v\f\r\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"


class SentencePieceReference:
    """Ids as a `SentencePieceProcessor` gives them.

    SentencePiece never reads a control token such as `</s>` from text. With `parse_special` the text is cut where one
    stands, and each stretch is encoded by itself, with the space the model puts before a text, if it does so.
    """

    def __init__(self, model: bytes, name: str) -> None:
        import sentencepiece

        self.name, self._model = name, model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # noqa: BLE001 - several classes, by release
            raise ConfigError(f"{name} is not a SentencePiece model: {error}") from None
        count = self.vocab_size = int(self._processor.get_piece_size())
        pieces = [self._processor.id_to_piece(number) for number in range(count)]
        control = {piece: number for number, piece in enumerate(pieces) if self._processor.is_control(number)}
        self._pieces = pieces
        known = {kind: int(getattr(self._processor, f"{kind}_id")()) for kind in ("bos", "eos", "pad", "unk")}
        self.special = SpecialTokens(named=control, **{kind: number for kind, number in known.items() if number >= 0})

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceReference, (self._model, self.name)

    def fingerprint(self) -> str:
        return f"sentencepiece-{xxhash.xxh3_128_hexdigest(self._model)}"

    def ids(self, texts: list[str], *, parse_special: bool) -> list[Ints]:
        if not parse_special:
            return self._plain(texts)
        found = list(self._plain(texts))
        marked = [row for row, text in enumerate(texts) if any(token in text for token in self.special.named)]
        cut = encode_segments([texts[row] for row in marked], self.special.named, self._plain_offsets)
        for row, one in zip(marked, cut):
            found[row] = one.ids
        return found

    def offsets(self, texts: list[str], *, parse_special: bool) -> list[Offsets]:
        return encode_segments(texts, self.special.named if parse_special else {}, self._plain_offsets)

    def decode(self, ids: Ints) -> str:
        """With the text of control tokens, which SentencePiece would leave out."""
        parts = []
        control = set(self.special.named.values())
        for special, run in itertools.groupby(ids.tolist(), key=control.__contains__):
            numbers = list(run)
            parts.append(
                "".join(self._pieces[number] for number in numbers) if special else self._processor.decode(numbers)
            )
        return "".join(parts)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ConfigError(f"{self.name} has no token {token}; its ids are 0 to {self.vocab_size - 1}")
        if self._processor.is_byte(token):
            return bytes.fromhex(self._pieces[token][3:5])
        return self._pieces[token].replace("▁", " ").encode()

    def table(self) -> TokenTable | None:
        return None

    def fast(self, *, parse_special: bool) -> FastModel | str:
        try:
            import gigatoken
        except ImportError as error:
            return f"it cannot be imported ({error}); install it with: pip install 'penstock[fast]'"
        model = self._model
        return FastModel(lambda: gigatoken.Tokenizer.from_sentencepiece(model).backend, traps=self._traps())

    def probes(self) -> list[str]:
        return [probe for text in self.special.named for probe in (text, f"a{text}b", f" {text} {text}\n")]

    def _traps(self) -> str:
        """Control tokens and user-defined symbols, which gigatoken reads from text, and whitespace that it strips."""
        score = [self._processor.get_score(number) for number in range(self.vocab_size)] + [0.0]
        # Symbols score 0, and so does the first piece that was trained: it is the one before -1.
        symbols = [
            piece
            for number, piece in enumerate(self._pieces)
            if score[number] == 0 and score[number + 1] != -1 and not self._processor.is_byte(number)
        ]
        patterns = [literal(symbol) for symbol in (*symbols, "\u0085", "▁")]
        if self._processor.encode("a ") == self._processor.encode("a"):
            patterns += [rf"\A *[{SPACES}]", rf"[{SPACES}] *\z"]
        return "|".join(patterns)

    def _plain(self, texts: list[str]) -> list[Ints]:
        if hasattr(self._processor, "encode_as_numpy"):
            found: list[Ints] = self._processor.encode_as_numpy(texts)
            return found
        return [np.array(ids, np.int32) for ids in self._processor.encode(texts)]

    def _plain_offsets(self, texts: list[str]) -> list[Offsets]:
        if not hasattr(self._processor, "encode_as_offset_mapping"):
            raise ConfigError(f"offsets of {self.name} need sentencepiece 0.2.2 or later; upgrade it")
        found = []
        for text in texts:
            given = self._processor.encode_as_offset_mapping(text)
            flat = np.fromiter(itertools.chain.from_iterable(given["offsets"]), np.int64)
            found.append(Offsets(np.array(given["ids"], np.int64), flat[::2], flat[1::2]))
        return found
