"""Makes `madeira/migrations/inventory.json`, the list of what the migrations make, from a database that has just been migrated.

Run as `make inventory`, after a new migration.
"""

import tempfile
from pathlib import Path

import psycopg

from madeira.embedded import EmbeddedPostgres
from madeira.store import inventory
from madeira.store.migrate import migrate

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        server = EmbeddedPostgres(folder=Path(folder) / "postgres", options={"fsync": "off"})
        server.start()
        try:
            migrate(server.url)
            with psycopg.connect(server.url) as conn:
                inventory.FILE.write_text(inventory.text_of(conn))
        finally:
            server.stop()
