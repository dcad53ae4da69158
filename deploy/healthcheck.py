"""Whether this container's process answers: ``python -I deploy/healthcheck.py PORT/PATH``.

The API at ``8000/readyz``, a worker at ``9191/metrics``, the scheduler at ``9192/metrics``. Without anything of Madeira, since it
runs every few seconds and must cost nothing; the image has no curl.
"""

import http.client
import sys

#: Seconds that an answer may take; less than the engine waits for this program.
TIMEOUT_S = 4.0


def main(target: str) -> int:
    """0 when what listens on this machine at `target` (``PORT/PATH``) is well, else 1 with the reason on standard error.

    It is well when it answers and does not say that it fails (5xx); a page that asks for a token is well too.
    """
    port, _, path = target.partition("/")
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        body = answer.read(500)
    except (OSError, http.client.HTTPException) as e:
        sys.stderr.write(f"{target}: {e}\n")
        return 1
    if answer.status >= http.client.INTERNAL_SERVER_ERROR:
        sys.stderr.write(f"{target}: {answer.status} {body.decode(errors='replace')}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
