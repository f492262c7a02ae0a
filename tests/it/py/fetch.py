"""A worker: COUNT fetches of URL, one after the other, with one kept-alive session.

Nothing here knows of a proxy; requests takes it, and the CA, from the environment.
Fetches once so that its connection stands, prints "ready", waits for a line on stdin so that all workers begin
together, then prints one status per fetch.
"""
import sys

import requests

name, count, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
session = requests.Session()
session.get(f"{url}?id=first-{name}", timeout=60).raise_for_status()
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    print(session.get(f"{url}?id={name}-{number}", timeout=60).status_code, flush=True)
