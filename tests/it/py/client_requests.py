"""requests with one session; which urllib3 is under it depends on the interpreter that runs this."""
import requests

import protocol

session = requests.Session()


def told(answer):
    return answer.status_code, answer.headers.get("Retry-After"), answer.content


protocol.main(
    lambda url: told(session.get(url)),
    lambda url, body: told(session.post(url, data=body)),
)
