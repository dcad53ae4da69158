"""The style, the script and the icon: files of ours, named by their contents, so that browsers may keep them for good."""

import hashlib
from pathlib import Path
from typing import Final

import falcon

_FOLDER: Final = Path(__file__).parent / "static"

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Assets:
    """``/console/static/{name}``."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, bytes]] = {}
        self._addresses: dict[str, str] = {}
        for file in sorted(_FOLDER.iterdir()):
            if file.suffix not in _TYPES:
                continue
            content = file.read_bytes()
            name = f"{file.stem}.{hashlib.sha256(content).hexdigest()[:16]}{file.suffix}"
            self._files[name] = (_TYPES[file.suffix], content)
            self._addresses[file.name] = f"/console/static/{name}"

    def address(self, name: str) -> str:
        """Where a file of this name is."""
        return self._addresses[name]

    def on_get(self, _req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Give a file."""
        if name not in self._files:
            raise falcon.HTTPNotFound
        resp.content_type, resp.data = self._files[name]
        resp.set_header("Cache-Control", "public, max-age=31536000, immutable")
