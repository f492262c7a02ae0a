"""What all Python clients have in common: `get URL...` on one session, or `post URL LENGTH`.

Prints a line for each answer: status, Retry-After or "-", SHA-256 of the body. Nothing here, and nothing in the clients,
knows of a proxy or of a CA: their libraries take both from the environment.
"""
import hashlib
import sys


def main(get, post):
    """`get(url)` and `post(url, body)` give status, Retry-After and body."""
    verb, *arguments = sys.argv[1:]
    if verb == "get":
        for url in arguments:
            say(*get(url))
    else:
        url, length = arguments
        say(*post(url, pattern(int(length))))


def pattern(length):
    return (bytes(range(251)) * (length // 251 + 1))[:length]


def say(status, retry_after, body):
    print(status, retry_after or "-", hashlib.sha256(body).hexdigest(), flush=True)
