"""Chats: from rows of any chat format to token ids and a loss mask.

A row takes these steps, one module each:

1. `formats`: the format of a batch is detected by its columns, and each row becomes a conversation.
2. `messages`: its messages get one form, with roles, content, thoughts, tool calls and training flags.
3. `templates`: the chat template (`template_files`, or the tokenizer's own), its settings, and the message forms it
   takes. `sandbox` runs it. `bound_template` finds, once, the tokens that end turns and those of role headers.
4. `render`: the text of a conversation. `parts` locates every part of the row in the text, tool calls included.
   `rendered_batch` does a whole batch, rows of plain text by a proven layout (`compile`).
5. `masks`: the supervised turns in the text, tool calls included. Turns become byte spans, spans become supervised
   tokens, and these the loss mask.
6. `gate`: the checks of every row; `problems` has an error class for each.

`format_chat` puts the steps together as a transform and truncates rows longer than `max_length`. `format_preference`
does it for pairs and labelled answers, and `to_messages` stops after step 2.
"""
