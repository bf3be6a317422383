"""Chat templates and prompt formatting, under the name design document 000 gives them: see `penstock.chat`."""

from penstock.chat.format_chat import FormatChat, Gate, ToMessages, detect_format
from penstock.chat.format_preference import FormatPreference

__all__ = ["FormatChat", "FormatPreference", "Gate", "ToMessages", "detect_format"]
