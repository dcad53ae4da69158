"""What is sent to a receiver, and what comes back: the only part of Madeira that speaks HTTP outward.

`request` makes the request of a claimed delivery, `signing` signs it, `client` calls the receiver over `transport`, and
`verdict` says what the answer came to. When it is tried again is decided by `madeira.retry`.
"""
