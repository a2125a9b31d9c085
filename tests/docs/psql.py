"""A stand-in for psql with what the docs use, `psql URL -f FILE`, so that the test needs Python alone."""

from __future__ import annotations

import sys
from pathlib import Path

import psycopg

url, option, file = sys.argv[1:]
if option != "-f":
    raise SystemExit(f"psql {option} is not played here")
with psycopg.connect(url, autocommit=True) as connection:
    connection.execute(Path(file).read_bytes())
