"""An example of a worker: fetches each of URLS, ROUNDS times, a few at once, with nothing but Python's own library.

It knows nothing of paceline. The proxy and the certificates that it trusts come from the environment (HTTPS_PROXY,
SSL_CERT_FILE), and so does the pace. What it does know is HTTP: an answer of 429 or 503 with Retry-After means later.
"""

import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

# Longer than paceline's max_wait (25 s): a client that gives up while it queues loses its turn, and asks again.
TIMEOUT = 60
ATTEMPTS = 5


def fetch(url):
    """Fetches one URL and returns its status."""
    for attempt in range(1, ATTEMPTS + 1):
        began = time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                body = answer.read()
                print(f"{answer.status} {len(body)} bytes {time.monotonic() - began:.2f} s {url}", flush=True)
                return answer.status
        except urllib.error.HTTPError as refusal:
            later = refusal.headers.get("Retry-After", "")
            if refusal.code not in (429, 503) or not later.isdigit() or attempt == ATTEMPTS:
                print(f"{refusal.code} {refusal.reason} {url}", flush=True)
                return refusal.code
            time.sleep(int(later))
        except OSError as fault:
            print(f"failed: {fault} {url}", flush=True)
            return 0
    return 0


def main():
    urls = os.environ["URLS"].split() * int(os.environ.get("ROUNDS", "1"))
    with ThreadPoolExecutor(max_workers=int(os.environ.get("THREADS", "4"))) as pool:
        statuses = list(pool.map(fetch, urls))
    sys.exit(0 if all(200 <= status < 400 for status in statuses) else 1)


if __name__ == "__main__":
    main()
