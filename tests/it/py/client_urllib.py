"""The standard library's urllib.request: a tunnel for each request, an exception for each error status."""
import urllib.error
import urllib.request

import protocol


def fetch(url, body=None):
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, data=body))
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, answer.headers.get("Retry-After"), answer.read()


protocol.main(fetch, fetch)
