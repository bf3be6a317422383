"""Document of a tokenizer in the format of `tokenizers`: the steps as Python objects, the model as JSON text.

The vocabulary and the merges are nearly all of a document. As Python objects they take longer to make than everything
else in it, and a full garbage collection each time. Where the place of the model is known, it is passed over.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson
import xxhash

from penstock.errors import ConfigError

log = logging.getLogger("penstock.transforms.tokenization")

MOST_GROWTH = 4096
"""Letters that the replacements of a tokenizer may make of one."""
_LARGE = ("vocab", "merges")
_MODEL = re.compile(r'"model"\s*:\s*')


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Place of the model in the text of a document, and what it holds besides vocabulary and merges."""

    start: int
    stop: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerDocument:
    """A checked document without post-processor, padding, truncation and dropout."""

    config: dict[str, Any]
    """The document; its model is JSON text."""
    model: Mapping[str, Any]
    """The model without its vocabulary and merges."""
    around: dict[str, Any] | None
    """The post-processor."""
    fingerprint: str = ""
    """Hash of everything that decides the ids; empty if the model was passed over."""

    @classmethod
    def parsed(cls, document: str, name: str, place: ModelPlace | None = None) -> Self:
        """The document of this text; `place` is that of its model, where the same text was parsed before."""
        options: Mapping[str, Any]
        if place is None:
            config = _checked(document, name)
            _switch_off(config, name)
            text, options = orjson.dumps(config["model"]), _options(config["model"])
            digest = fingerprint_of(config)
        else:
            config = orjson.loads(f"{document[: place.start]}null{document[place.stop :]}")
            _switch_off(config, name)
            text, options = document[place.start : place.stop].encode(), place.options
            digest = ""
        around = config.get("post_processor")
        return cls(config | {"post_processor": None, "model": orjson.Fragment(text)}, options, around, digest)


def fingerprint_of(config: Mapping[str, Any]) -> str:
    """Hash of everything in a document that decides the ids."""
    decisive = {part: config.get(part) for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    return f"tokenizers-{xxhash.xxh3_128_hexdigest(orjson.dumps(decisive, option=orjson.OPT_SORT_KEYS))}"


def model_place(document: str) -> ModelPlace | None:
    """Place of the model in a document that was parsed; None if the model is not to be taken as it is."""
    if (match := _MODEL.search(document)) is None:
        return None
    try:
        _, stop = json.JSONDecoder(object_pairs_hook=_without_doubles).raw_decode(document, start := match.end())
        model = orjson.loads(document[start:stop])
        rest = orjson.loads(f"{document[:start]}null{document[stop:]}")
    except ValueError:
        return None
    if not isinstance(model, dict) or not isinstance(rest, dict) or model.get("dropout"):
        return None
    if rest | {"model": model} != orjson.loads(document):  # a "model" somewhere else
        return None
    return ModelPlace(start, stop, _options(model))


def conflict_of(added: Sequence[Mapping[str, Any]], *, prefixed: bool) -> str | None:
    """Property of added tokens that makes ids depend on the order in which a library looks for them; None without.

    `tokenizers` first looks for those that are matched before normalisation, and for the others in what is left;
    white space is stripped from what is left, too. A library that looks for all at once finds others where two of
    them could share characters. `prefixed` is true if a space is added before a text.
    """
    texts = [token["content"] for token in added]
    if any(text != text.rstrip() for text in texts) and any(token.get("lstrip") for token in added):
        return "added tokens that strip white space on their left beside others that end with it"
    strips = prefixed or any(token.get("rstrip") for token in added)
    if any(text != text.lstrip() for text in texts) and strips:
        return "added tokens that begin with white space where a space is added, or stripped by others"
    before = [token["content"] for token in added if not token.get("normalized")]
    after = [token["content"] for token in added if token.get("normalized")]
    if before and after and (_share(before, after) or _share(after, before)):
        return "added tokens that share characters, some matched before normalisation and some after it"
    return None


def passed_over_conflict(passed_over: Sequence[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> str | None:
    """Property of added tokens that makes ids depend on special tokens that are ordinary text; None without.

    `tokenizers` finds a special token that is text, passes over it, and looks on behind it: another token that begins
    inside is not found. A library that is not given the special token finds the other. Contents are the texts that are
    looked for, normalised if that is done after normalisation.
    """
    for normalized in (False, True):
        outer, inner = (
            [token["content"] for token in tokens if bool(token.get("normalized")) == normalized]
            for tokens in (passed_over, added)
        )
        if _begin_inside(inner, outer):
            return "added tokens that may begin inside of special tokens, which are text here"
    return None


def _share(texts: Sequence[str], others: Sequence[str]) -> bool:
    """True if one of the texts is within one of the others, or ends as one of them begins."""
    joined = "\0".join(others)
    begins = {text[:stop] for text in others for stop in range(1, len(text) + 1)}
    return any(text in joined or any(text[start:] in begins for start in range(len(text))) for text in texts)


def _begin_inside(texts: Sequence[str], others: Sequence[str]) -> bool:
    """True if one of the texts may begin inside one of the others. Of two that begin together, the longer is found."""
    joined = "\0".join(others)
    begins = {text[:stop] for text in texts for stop in range(1, len(text) + 1)}
    return any(text in joined for text in texts) or any(
        text[start:] in begins for text in others for start in range(1, len(text))
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; libraries may differ in which of two fields of the same name they take."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _options(model: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key not in _LARGE}


def _checked(document: str, name: str) -> dict[str, Any]:
    try:
        config = orjson.loads(document)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ConfigError(f"{name} is not a tokenizer.json: it has no 'model'")
    for part, inside in (("normalizer", "normalizers"), ("decoder", "decoders")):
        _check_growth(config.get(part), inside, f"the {part} of {name}")
    return config


def _check_growth(step: Any, inside: str, name: str) -> None:
    """Refuse replacements that together make a text much longer than any model wants."""
    growth, steps = 1, [step]
    while steps:
        step = steps.pop()
        if isinstance(step, dict) and step.get("type") == "Sequence" and isinstance(step.get(inside), list):
            steps += step[inside]
        elif isinstance(step, dict) and step.get("type") == "Replace":
            growth *= max(1, len(str(step.get("content"))))
    if growth > MOST_GROWTH:
        raise ConfigError(f"{name} makes a text up to {growth:,} times as long, at most {MOST_GROWTH:,} times is taken")


def _switch_off(config: dict[str, Any], name: str) -> None:
    """Switch off padding, truncation and dropout."""
    for setting in ("padding", "truncation"):
        if config.get(setting):
            log.warning("%s: its %s setting %s is switched off", name, setting, config[setting])
            config[setting] = None
    if isinstance(config["model"], dict) and config["model"].get("dropout"):
        log.warning("%s: its dropout of %s is switched off", name, config["model"]["dropout"])
        config["model"]["dropout"] = None
