"""What people and their programs do over HTTP: sources, endpoints and routes, tokens, the audit, trying rules out.

All of it asks for a bearer token; what a role may do stands beside each operation. Every change leaves one row in the audit,
in the transaction that makes it.
"""
