"""Chat templates: compiled and rendered in the sandbox."""

from __future__ import annotations

from penstock.chat.messages import Conversation
from penstock.chat.render import Renderer
from penstock.chat.templates import load_template

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def run(data: bytes) -> None:
    source = data.decode("utf-8", "replace")
    renderer = Renderer(load_template(None, source), {})
    renderer.text_of(Conversation([dict(message) for message in MESSAGES]))
