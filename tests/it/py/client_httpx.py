"""httpx with one client and its own time-outs, five seconds each."""
import httpx

import protocol


def told(answer):
    return answer.status_code, answer.headers.get("Retry-After"), answer.content


with httpx.Client() as client:
    protocol.main(
        lambda url: told(client.get(url)),
        lambda url, body: told(client.post(url, content=body)),
    )
