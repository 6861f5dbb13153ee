"""What a page of the report holds."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def unpacked(page: str) -> dict[str, Any]:
    """The view in the text of a page."""
    found = re.search(r'id="data">([^<]*)<', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def texts_of(page: Path) -> str:
    """All that a page shows, as JSON with the characters as they are."""
    return json.dumps(unpacked(page.read_text()), ensure_ascii=False)
