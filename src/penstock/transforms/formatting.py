"""Chat templates and prompt formatting, under the name design document 000 gives them: see `penstock.chat`."""

from penstock.chat.format_chat import *
from penstock.chat.format_preference import *
