"""Text for people: what may be printed on a terminal."""

from __future__ import annotations

import re

# ECMA-48: CSI sequences (colours, cursor), OSC and the other string sequences (titles, clipboard) up to
# their terminator or the end of the line, and the short escapes. The one-byte forms are U+0080 to U+009F.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def strip_control(text: str) -> str:
    """Remove terminal escape sequences and control characters, except newlines and tabs.

    For every text that a trial, a file or a peer supplied: an escape sequence in it could move the cursor, rename the
    window or fill the clipboard of the person who reads it. Lone surrogates become ``?``, so that the text can be
    encoded.
    """
    plain = _CONTROL.sub("", _SEQUENCE.sub("", text))
    return plain.encode("utf-8", "replace").decode("utf-8")
