"""A stand-in for curl with the options that the README uses, so that the test needs Python alone."""

from __future__ import annotations

import argparse
import sys
from urllib.request import ProxyHandler, Request, build_opener

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("-s", action="store_true")
parser.add_argument("-S", action="store_true")
parser.add_argument("-X", default=None)
parser.add_argument("-H", action="append", default=[])
parser.add_argument("-d", default=None)
given = parser.parse_args()

request = Request(given.url, data=given.d.encode() if given.d else None, method=given.X)
for header in given.H:
    name, _, value = header.partition(": ")
    request.add_header(name, value)
with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:  # an error status raises, and the block ends
    sys.stdout.write(answer.read().decode() + "\n")
