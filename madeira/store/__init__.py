"""Postgres, the memory of Madeira: the only package that speaks SQL.

Each module holds its statements in one block at its head, each with a name and a line on what it does. Every statement
that moves a row names the state it starts from; the database checks the same moves a second time (see ``migrations``).
Locks are always taken in the same order, event before delivery, each ascending, so that two groups cannot deadlock.
"""
