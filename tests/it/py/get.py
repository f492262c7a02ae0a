"""Fetches one URL with requests and writes its body to stdout. Proxy and CA come from the environment."""
import sys

import requests

answer = requests.get(sys.argv[1], timeout=30)
answer.raise_for_status()
sys.stdout.buffer.write(answer.content)
