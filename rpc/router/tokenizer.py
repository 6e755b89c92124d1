"""The model's tokenizer files as one zip archive: what the router tokenizes and renders chats with.

The archive depends on the files' names and contents only, so that servers of one model agree on its hash.
"""

import hashlib
import io
import zipfile
from pathlib import Path

from loader.checkpoint import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from loader.generation import GENERATION_FILE

FILES = (
    *(TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE),
    *("special_tokens_map.json", "added_tokens.json"),
)


def tokenizer_archive(folder: Path) -> tuple[bytes, str]:
    """The archive of the folder's tokenizer files and its SHA-256 in hex. Raises OSError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in FILES:
            if (folder / name).is_file():
                entry = zipfile.ZipInfo(name)  # its date is constant
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, (folder / name).read_bytes())
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()
