#!/bin/sh
# Sends a file of events, one a line, with curl and openssl: at most 5,000 lines and 10 MiB.
#
#     URL=http://127.0.0.1:8000 SOURCE=demo SECRET=demo-secret ./send_batch.sh events.ndjson
set -eu

now=$(date +%s)
signature=$({ echo "$now"; cat "$1"; } | openssl dgst -sha256 -hmac "$SECRET" -r | cut -d' ' -f1)

# --data-binary, since -d would take the newlines out.
curl --silent --show-error --fail-with-body --retry 5 --retry-connrefused --max-time 60 "$URL/v1/events/batch" \
    -H 'Content-Type: application/x-ndjson' -H "X-Madeira-Source: $SOURCE" \
    -H "X-Madeira-Timestamp: $now" -H "X-Madeira-Signature: $signature" \
    --data-binary "@$1"
