#!/bin/sh
# Sends one event with curl and openssl.
#
#     URL=http://127.0.0.1:8000 SOURCE=demo SECRET=demo-secret ./send.sh order-1
set -eu

body=$(mktemp)
trap 'rm -f "$body"' EXIT
printf '{"event_id": "%s", "event_type": "order.created", "payload": {"total": 42}}' "$1" >"$body"

# The signature is the HMAC-SHA256 of the timestamp, a newline and the body, byte for byte.
now=$(date +%s)
signature=$({ echo "$now"; cat "$body"; } | openssl dgst -sha256 -hmac "$SECRET" -r | cut -d' ' -f1)

# To try again is harmless: the event has an id.
curl --silent --show-error --fail-with-body --retry 5 --retry-connrefused --max-time 30 "$URL/v1/events" \
    -H 'Content-Type: application/json' -H "X-Madeira-Source: $SOURCE" \
    -H "X-Madeira-Timestamp: $now" -H "X-Madeira-Signature: $signature" \
    --data-binary "@$body"
